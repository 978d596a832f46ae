"""`mm plugins new --from-diffusers`: the frame of a predictor around a transformer class of Diffusers."""

from __future__ import annotations

import inspect
import json
import keyword
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from textwrap import indent
from types import MappingProxyType
from typing import Any

from mm_core.errors import PluginError, did_you_mean, plural
from mm_core.plugin.scaffold.kinds import TEMPLATES, KindTemplate

_TEXT = ("text_embed_dim", "joint_attention_dim", "caption_channels", "text_dim", "cross_attention_dim")
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

_SMALL: Mapping[str, int] = MappingProxyType(
    {
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 16,
        "pooled_projection_dim": 8,
    }
)
"""Fields of a small instance, where the class has them."""


def frame(name: str, package: str) -> tuple[dict[str, str], dict[str, KindTemplate]]:
    """What `new_plugin` takes for a predictor around a class of Diffusers.

    Args:
        name: the class.
        package: the plugin's package.

    Returns:
        The module's text by kind, and the templates with that of this predictor.

    Raises:
        PluginError: Diffusers is not installed, or has no such transformer.
    """
    cls = _class(name)
    fields = {n: p for n, p in inspect.signature(cls.__init__).parameters.items() if n != "self"}
    text = next((field for field in _TEXT if field in fields), None)
    tiny = {field: value for field, value in _SMALL.items() if field in fields}
    tiny |= {text: 12} if text else {}
    own = "Wrapped" if name == "Wrapped" else name.partition("Transformer")[0] or "Wrapped"
    template = KindTemplate(
        own,
        f"Diffusers' {name}",
        tiny,
        run={"task.predictor": f"\ntype: $type\n{_yaml(fields)}"},
        steps=1500,
        about="of the library's size: give it the autoencoder, text encoder and data that it is for",
        requires=(f"diffusers>={'.'.join(version('diffusers').split('.')[:2])}",),
    )
    return {"predictor": _module(name, own, cls, fields, text)}, {**TEMPLATES, "predictor": template}


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


def _yaml(fields: Mapping[str, inspect.Parameter]) -> str:
    """The class's fields with the library's defaults."""
    lines = []
    for name, parameter in fields.items():
        default = parameter.default
        value = "# TODO" if default is parameter.empty else json.dumps(default)
        if isinstance(default, float) and "." not in value:
            value = value.replace("e", ".0e")  # a number in every version of YAML
        lines.append(f"{name}: {value}")
    return "\n".join(lines)


def _module(name: str, own: str, cls: Any, fields: Mapping[str, inspect.Parameter], text: str | None) -> str:
    """The text of the predictor's module."""
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

from mm_core.contracts import reset_parameters


class {own}({name}):
    """Written for Diffusers {version("diffusers")}."""

    text_padding = "masked"  # TODO: ("fixed", n) if the pipeline pads to n tokens and does not use the mask

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

    init_weights = reset_parameters  # TODO: fill tables too that no layer fills
'''


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
