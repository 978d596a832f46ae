"""`mm plugins new --from-diffusers`: the frame of a predictor around a transformer class of Diffusers."""

from __future__ import annotations

import inspect
import json
import keyword
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from textwrap import indent
from types import MappingProxyType
from typing import Any

from mm_core.errors import PluginError, did_you_mean, plural
from mm_core.plugin.hookspecs import COMPONENT_KINDS
from mm_core.plugin.kinds import ComponentKind
from mm_core.plugin.scaffold.runs import SHAPES

TEXT_WIDTHS = (
    *("text_embed_dim", "joint_attention_dim", "caption_channels", "text_dim", "cap_feat_dim"),
    "cross_attention_dim",
)
"""Fields in which families of models have the width of the text, the surest first."""

_GIVEN: Mapping[str, str] = MappingProxyType(
    {
        "hidden_states": "latents,  # TODO: in the layout of the library's pipeline",
        "timestep": "timestep,  # TODO: 0 to 1000; divide it if the pipeline does",
        "encoder_hidden_states": "text,",
        "encoder_attention_mask": "text_mask,",
        "pooled_projections": "pooled,",
        "guidance": "guidance,  # TODO: only if guidance_embeds; times 1000 if the pipeline does so",
        "return_dict": "False,",
    }
)
"""Argument of the library's forward -> what the frame passes."""

SMALL: Mapping[str, object] = MappingProxyType(
    {
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "num_attention_heads": 2,
        "num_kv_heads": 2,
        "n_layers": 1,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "dim": 32,
        "axes_dims": [4, 6, 6],
        "attention_head_dim": 16,
        "hidden_size": 32,  # heads times their width
        "multiple_of": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 16,
        "pooled_projection_dim": 8,
        "caption_projection_dim": 32,  # heads times their width
        "cross_attention_dim": 32,
        "ffn_dim": 64,
        "freq_dim": 16,
        "rope_axes_dim": [4, 6, 6],  # together the width of a head
        "axes_dims_rope": [4, 6, 6],
        "axes_dim_rope": [4, 6, 6],
    }
)
"""Fields of a small instance, where the class has them."""
_RUN: Mapping[str, object] = MappingProxyType({"in_channels": 12, "out_channels": 12, "num_layers": 2})
"""Fields that differ in the small instance's run: the autoencoder of its config has 12 channels."""
_NO_SIZE = "TODO"
"""A field that no class has, in place of a small instance's fields."""
_MAX_FRAMES = "\n    max_frames = 1  # a model of images"
_MOST = 30_000_000
"""Parameters of the largest instance that is built to see which of its tensors no layer initialises."""


def frame(name: str) -> ComponentKind:
    """The record of predictors, with the module and config of a predictor around a class of Diffusers.

    Raises:
        PluginError: Diffusers is not installed, or has no such transformer.
    """
    cls = _class(name)
    fields = {n: p for n, p in inspect.signature(cls.__init__).parameters.items() if n != "self"}
    text = next((field for field in TEXT_WIDTHS if field in fields), None)
    tiny = _tiny(cls, fields, {text: 12} if text else {})
    small = tiny | {field: value for field, value in _RUN.items() if field in fields}
    small |= {text: 64} if text else {}
    own = "Wrapped" if name == "Wrapped" else name.partition("Transformer")[0] or "Wrapped"
    images = "2D" in name
    run = {"data.train": SHAPES.replace("num_frames: 8", "num_frames: 1")} if images else {}
    shown = "small" if _NO_SIZE not in tiny else "TODO: with small values here and in `tiny` of plugin.py"
    return replace(
        COMPONENT_KINDS["predictor"],
        target=own,
        text=_module(name, own, cls, fields, text, tiny),
        words=f"Diffusers' {name}",
        tiny=tiny,
        run={"task.predictor": f"\ntype: $type\n{_yaml(fields, small)}", **run},
        about=f"{shown}, on {'images of' if images else 'clips of moving'} shapes. The library's size has "
        "the values of the comments, and needs the autoencoder, text encoder and data that it is for",
        requires=(f"diffusers>={'.'.join(version('diffusers').split('.')[:2])}",),
    )


def _tiny(
    cls: Any, fields: Mapping[str, inspect.Parameter], given: Mapping[str, object]
) -> dict[str, object]:
    """Fields of a small instance of a class: those of `SMALL` with which it can be built.

    Where none is small, a field that the class lacks: the check of its config names it, before anything
    large is built.
    """
    known = {field: value for field, value in SMALL.items() if field in fields} | dict(given)
    # Some families give these fields another meaning.
    for left_out in ((), ("rope_axes_dim", "axes_dims_rope", "axes_dim_rope", "axes_dims"), ("hidden_size",)):
        tiny = {field: value for field, value in known.items() if field not in left_out}
        if (size := _size(cls, tiny)) is not None and size <= _MOST:
            return tiny
    return {_NO_SIZE: "fields of a small instance"}


def _size(cls: Any, fields: Mapping[str, object]) -> int | None:
    """Number of parameters of an instance, built without memory; None if it cannot be built."""
    try:
        with import_module("torch").device("meta"):
            return sum(int(parameter.numel()) for parameter in cls(**fields).parameters())
    except Exception:  # the class needs other fields
        return None


def _class(name: str) -> Any:
    try:
        library: Any = import_module("diffusers")
    except ImportError as error:
        raise PluginError(
            "Diffusers cannot be imported", where="--from-diffusers", hint="pip install diffusers"
        ) from error
    known = [each for each in dir(library) if "Transformer" in each and each.endswith("Model")]
    if name not in known:
        raise PluginError(
            f"Diffusers {version('diffusers')} has no transformer named {name!r}",
            accepted=f"one of its {plural(len(known), 'class')}, such as CogVideoXTransformer3DModel",
            hint=did_you_mean(name, known),
        )
    return getattr(library, name)


def _yaml(fields: Mapping[str, inspect.Parameter], small: Mapping[str, object]) -> str:
    """The class's fields with small values, or the library's defaults."""
    lines = []
    for name, parameter in fields.items():
        default = parameter.default
        value = "# TODO" if default is parameter.empty else json.dumps(default)
        if isinstance(default, float) and "." not in value:
            value = value.replace("e", ".0e")  # a number in every version of YAML
        if name in small and default != small[name]:
            value = f"{json.dumps(small[name])}  # {value.removeprefix('# TODO') or 'none'} in the library"
        lines.append(f"{name}: {value}")
    return "\n".join(lines)


def _module(
    name: str,
    own: str,
    cls: Any,
    fields: Mapping[str, inspect.Parameter],
    text: str | None,
    tiny: Mapping[str, object],
) -> str:
    """The text of the predictor's module."""
    start = "\n".join(_init_weights(name, cls, tiny))
    imports = (
        ["reset_parameters"] if "empty_parameters" not in start else ["empty_parameters", "reset_parameters"]
    )
    forward = {n: p for n, p in inspect.signature(cls.forward).parameters.items() if n != "self"}
    conditions = [c for n, c in (("pooled_projections", "pooled"), ("guidance", "guidance")) if n in forward]
    parameters = ["self", "latents", "timestep", "text", "text_mask"]
    parameters += [f"{c}=None" if c == "guidance" else c for c in conditions]
    body = "\n".join(_arguments(forward))
    return f'''"""Diffusers' {name} as a predictor: its class, with mm_core's arguments.

Read how the library's *pipeline* calls the transformer: layout of latents, scale of time, length of text.
Then do what the lines with TODO ask; `pytest` shows what is left. The page "Wrap a Diffusers model" has five
examples.
"""

from functools import wraps

from diffusers import {name}
{"from torch import nn" + chr(10) if "nn.init" in start else ""}
from mm_core.contracts import {", ".join(imports)}


class {own}({name}):
    """Written for Diffusers {version("diffusers")}."""

    {_text_padding(forward, fields)}{_MAX_FRAMES if "2D" in name else ""}

    @wraps({name}.__init__)
    def __init__(self, **fields):
        super().__init__(**fields)
{indent(chr(10).join(_attributes(fields, text, conditions)), " " * 8)}

    def forward({", ".join(parameters)}):
        """latents [B,C,T,H,W], timestep [B], text [B,L,D], text_mask [B,L] -> [B,C,T,H,W]."""
        (predicted,) = super().forward(
{indent(body, " " * 12)}
        )
        return predicted.clone()  # TODO: back to [B,C,T,H,W]; a new tensor, no view

    def init_weights(self):
        """Fills every parameter and buffer in place: the constructor runs without memory."""
{indent(start, " " * 8)}
'''


def _text_padding(forward: Collection[str], fields: Mapping[str, inspect.Parameter]) -> str:
    """The line that declares how the text is padded: a forward without a mask needs a fixed length."""
    if "encoder_attention_mask" in forward:
        return (
            'text_padding = "masked"  # TODO: ("fixed", n) if the pipeline pads to n tokens, and uses no mask'
        )
    known = fields.get("max_text_seq_length")
    length = known.default if known and isinstance(known.default, int) else 512
    return f'text_padding = ("fixed", {length})  # TODO: the length to which the pipeline pads'


def _init_weights(name: str, cls: Any, tiny: Mapping[str, object]) -> Iterator[str]:
    """The lines that initialise: the layers, what no layer initialises, and the library's buffers."""
    yield "reset_parameters(self)"
    found = _uninitialised(cls, tiny)
    if found is None:
        yield "# TODO: fill parameters and buffers that no layer fills"
        return
    by_call: dict[str, list[str]] = {}
    for suffix, call in found[0].items():
        by_call.setdefault(call, []).append(suffix)
    if by_call:
        yield "for name, parameter in self.named_parameters():"
    for call, suffixes in by_call.items():
        names = ", ".join(f'"{suffix}"' for suffix in suffixes)
        yield f"    if name.endswith({f'({names})' if len(suffixes) > 1 else names}):"
        yield f"        {call}"
    if found[1] or found[2]:
        yield "with empty_parameters():"
        yield f"    tables = {name}.from_config(self.config)"
    if found[1]:
        yield "for name, table in tables.named_buffers():"
        yield "    self.get_buffer(name).copy_(table)"
    for path in (re.sub(r"\.(\d+)", r"[\1]", path) for path in found[2]):
        yield f"self.{path} = tables.{path}  # tensors that are neither parameters nor buffers"


def _uninitialised(cls: Any, tiny: Mapping[str, object]) -> tuple[dict[str, str], bool, list[str]] | None:
    """Parameters of the class that `reset_parameters` leaves unset, from a small instance.

    Returns:
        The ends of their names with the calls that fill them as the library's constructor does, whether the
        class has buffers, and attributes with lists of tensors; None if no small instance can be built.
    """
    torch, reset_parameters = import_module("torch"), import_module("mm_core.contracts").reset_parameters
    try:
        model = cls(**tiny)
        values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, torch.nan)
        reset_parameters(model)
    except Exception:  # the class needs other fields than the usual ones, or has layers without a reset
        return None
    left = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    found = {_suffix(name, values.keys() - set(left)): _filling(values[name]) for name in left}
    lists = [
        f"{path}.{attribute}".lstrip(".")
        for path, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, list | tuple) and any(isinstance(each, torch.Tensor) for each in value)
    ]
    return found, any(True for _ in model.buffers()), lists


def _suffix(name: str, others: Iterable[str]) -> str:
    """The shortest end of a parameter's name, in whole parts, that no other one's has."""
    parts = name.split(".")
    kept = min(2, len(parts)) if parts[-1] in ("weight", "bias") else 1
    while any(f".{other}".endswith("." + ".".join(parts[-kept:])) for other in others) and kept < len(parts):
        kept += 1
    return ".".join(parts[-kept:])


def _filling(value: Any) -> str:
    """The call that fills a parameter with values like these."""
    if (value == value.flatten()[0]).all():
        return f"nn.init.constant_(parameter, {value.flatten()[0].item()})"
    std = float(value.std())
    if 0.8 < std * value.shape[-1] ** 0.5 < 1.25:
        return "nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)"
    return f"nn.init.normal_(parameter, std={std:.2g})  # TODO: as the library's constructor"


def _attributes(
    fields: Mapping[str, inspect.Parameter], text: str | None, conditions: list[str]
) -> Iterator[str]:
    """The lines that set what a predictor must have."""
    time = "self.config.patch_size_t or 1" if "patch_size_t" in fields else "1"
    if "patch_size" in fields and not isinstance(fields["patch_size"].default, tuple):
        yield f"sizes = ({time}, self.config.patch_size, self.config.patch_size)"
        yield "self.patch_size = sizes  # TODO: latents of one token along (t, h, w)"
    elif "patch_size" in fields:
        yield "self.patch_size = tuple(self.config.patch_size)  # (t, h, w)"
    else:
        yield "self.patch_size = (1, 1, 1)  # TODO: latents of one token along (t, h, w)"
    for name in ("in_channels", "out_channels"):
        if name in fields:
            default = " or self.config.in_channels" if fields[name].default is None else ""
            yield f"self.{name} = self.config.{name}{default}  # TODO: of the latents"
        else:
            yield f"self.{name} = 16  # TODO: channels of the latents"
    yield f"self.text_dim = self.config.{text}" if text else "self.text_dim = 4096  # TODO: width of the text"
    if conditions:
        pooled = (
            "(self.config.pooled_projection_dim,)" if "pooled_projection_dim" in fields else "(768,)  # TODO"
        )
        shapes = {"pooled": pooled, "guidance": "()"}
        listed = ", ".join(f'"{condition}": {shapes[condition]}' for condition in conditions)
        yield f"self.condition_shapes = {{{listed}}}"


def _arguments(forward: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    """The arguments of the library's forward: those that are known, then the others for the author."""
    for name in forward:
        if name in _GIVEN:
            yield f"{name}={_GIVEN[name]}"
    for name, parameter in forward.items():
        if name in _GIVEN or keyword.iskeyword(name):
            continue
        if parameter.default is parameter.empty:
            yield f"{name}=None,  # TODO: the pipeline computes it"
        else:
            yield f"# {name}={parameter.default!r},"
