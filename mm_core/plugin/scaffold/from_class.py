"""`mm plugins new --from-class`: a component around a user's own model or dataset."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from string import Template
from textwrap import indent
from types import MappingProxyType

from mm_core.errors import PluginError
from mm_core.plugin.hookspecs import COMPONENT_KINDS
from mm_core.plugin.kinds import ComponentKind
from mm_core.plugin.scaffold.diffusers_frame import SMALL, TEXT_WIDTHS
from mm_core.plugin.scaffold.own_class import CHECK, MARK, TYPING, Argument, OwnClass, read_class

_LATENTS = ("hidden_states", "x", "latents", "latent", "sample", "noisy_latents", "x_t", "z", "inputs")
_TIMESTEP = ("timestep", "t", "timesteps", "time", "time_step")
_TEXT = (
    *("encoder_hidden_states", "context", "text", "prompt_embeds", "text_embeds", "text_states"),
    *("caption_embeds", "y", "cond"),
)
_MASK = (
    *("encoder_attention_mask", "text_mask", "encoder_hidden_states_mask", "context_mask", "prompt_mask"),
    *("prompt_attention_mask", "prompt_embeds_mask", "text_attention_mask", "mask"),
)
"""Names that the arguments of a forward have, the surest first."""
_PASSED = ("fps", "guidance")
"""Arguments of a forward that the task gives under these names, if the model names them."""

_IN = ("in_channels", "in_dim", "input_channels", "latent_channels", "in_chans")
_OUT = ("out_channels", "out_dim", "output_channels", "out_chans")
_LENGTHS = (
    "text_len",
    "max_text_seq_length",
    "max_text_length",
    "text_length",
    "text_seq_len",
    "text_tokens",
)
_LAYERS = ("num_layers", "depth", "num_blocks", "n_layers")
_PATCH_TIMES = ("patch_size_t", "temporal_patch_size", "patch_size_temporal")
_SIZES: Mapping[str, object] = MappingProxyType(
    {
        **SMALL,
        **{"depth": 1, "num_blocks": 1, "num_heads": 2, "heads": 2, "head_dim": 16, "width": 32},
        **{"embed_dim": 32, "model_dim": 32, "inner_dim": 32, "mlp_dim": 64, "frequency_embedding_size": 16},
        **dict.fromkeys((*_IN, *_OUT), 4),
    }
)
"""Fields of a small model; a width is heads times their width."""
_OF_RUN = MappingProxyType(dict.fromkeys((*_IN, *_OUT), 12) | dict.fromkeys(_LAYERS, 2))
"""Fields that differ in the run of its config: the autoencoder there has 12 channels."""
_CLIPS: Mapping[str, object] = MappingProxyType({"num_frames": 8, "height": 16, "width": 16})

_CLIP = ("pixel_values", "video", "pixels", "frames", "clip", "videos", "image", "images")
_CAPTION = ("caption", "text", "prompt", "cap", "captions", "prompts", "sentence", "description")
_ID = ("id", "path", "video_path", "video_id", "name", "file")
_FPS = ("fps", "frame_rate")
_LAYOUTS = MappingProxyType({"3,0,1,2": "c f y x", "1,0,2,3": "c f y x", "0,3,1,2": "f c y x"})
"""Arguments of the last `permute` in a dataset's code -> the layout that it probably makes."""


def components(named: Iterable[str], package: str, others: Collection[str]) -> dict[str, ComponentKind]:
    """The records of the kinds with components around a user's classes.

    Args:
        named: the classes, each as `file.py:CLASS`.
        package: the plugin's package.
        others: kinds of which the plugin has a component already.

    Raises:
        PluginError: a class cannot be read, two are of one kind, or the arguments of a forward have no names.
    """
    found: dict[str, ComponentKind] = {}
    copied: dict[str, set[str]] = {}  # file -> modules of its classes
    for each in named:
        file = each.rpartition(":")[0]
        used = {name for other, names in copied.items() if other != file for name in names}
        own = read_class(each, {"plugin", *COMPONENT_KINDS, *used})
        if own.kind in {*found, *others}:
            raise PluginError(
                f"{each} is a second {own.kind}", where="--from-class", accepted="one class of each kind"
            )
        record, words = _predictor(own) if own.kind == "predictor" else _dataset(own)
        found[own.kind] = replace(
            record,
            text=_filled(own.kind, {**words, "package": package}),
            modules=own.modules,
            requires=own.requires,
            words=f"{own.name} of {own.file.name}",
        )
        copied[file] = {name.removesuffix(".py") for name in own.modules}
    return found


# -- models --------------------------------------------------------------------------------------


def _predictor(own: OwnClass) -> tuple[ComponentKind, dict[str, str]]:
    fields, forward = own.arguments("__init__"), own.arguments("forward")
    method = own.method("forward")
    if not forward or method is None:
        raise PluginError(
            f"forward of {own.name} has no argument with a name",
            where=f"{own.file}:{method.lineno if method else 1}",
            accepted="such as forward(self, hidden_states, timestep, encoder_hidden_states)",
            hint="name the arguments: *args and **kwargs have none",
        )
    text = _first(forward, _TEXT)
    listed, stacked = _is_list(text), _is_list(_first(forward, _LATENTS))
    fixed = text is not None and not listed and _first(forward, _MASK) is None
    names = {field.name for field in fields}
    length = _known(_LENGTHS, names) if fixed else None
    parameters = [*_parameters(own, fields)]
    if fixed and length is None:
        length = "text_tokens"
        parameters.append(
            f"text_tokens: int = 512,  {CHECK}without a mask, captions are padded to so many tokens, by zeros"
        )
    given = ["latents", "timestep", "text", "text_mask"]
    given += ["text_lengths=None"] if listed else []
    given += [f"{a.name}{'' if a.default is None else '=None'}" for a in forward if a.name in _PASSED]
    target = f"{own.name}Predictor"
    kept = [field for field in fields if field.is_key]
    words = {
        **_words(own, target, kept, '            "{0}": {0},'),
        "parameters": indent("\n".join(parameters), " " * 8),
        "attributes": indent("\n".join(_attributes(fields, length)), " " * 8),
        "given": ", ".join(given),
        "arguments": indent("\n".join(_arguments(forward, listed)), " " * 12),
        "result": "torch.stack([*predicted])" if stacked else f"predicted{'[0]' * _returns_several(method)}",
        "torch": "\nimport torch\n" if stacked else "",
    }
    extra = [Argument(length, default="512")] if length and length not in names else []
    text_width, known = _known(TEXT_WIDTHS, names), [field.name for field in (*fields, *extra)]
    tiny = _small(known, _SIZES, {text_width: 12, length: 8})
    run = _small(known, {**_SIZES, **_OF_RUN}, {text_width: 64, length: 32})
    config = {"task.predictor": f"\ntype: $type\n{_yaml([*kept, *extra], run)}"}
    if length:
        config["task.text_encoder"] = "{type: bytes, hidden_size: 64, max_length: 32}"
    about = "small, on clips of moving shapes. The class's own values are in the comments"
    tiny |= _required(kept, tiny)
    return replace(COMPONENT_KINDS["predictor"], target=target, tiny=tiny, run=config, about=about), words


def _small(
    names: Iterable[str], sizes: Mapping[str, object], own: Mapping[str | None, object]
) -> dict[str, object]:
    """The sizes of a small model, for those of the names that have one."""
    return {name: own.get(name, sizes.get(name)) for name in names if name in {*own, *sizes}}


def _attributes(fields: Iterable[Argument], length: str | None) -> Iterator[str]:
    """The lines that set what a predictor must have, from the constructor's arguments."""
    known = {field.name: field for field in fields}
    patch, times = known.get("patch_size"), _known(_PATCH_TIMES, known)
    note = f"  {CHECK}latents of one token along (t, h, w)"
    if patch is not None and ("tuple" in (patch.annotation or "").lower() or isinstance(patch.value, tuple)):
        yield "self.patch_size = tuple(patch_size)  # latents of one token along (t, h, w)"
    elif patch is not None and times:
        yield f"self.patch_size = ({times} or 1, patch_size, patch_size)"
    else:
        yield f"self.patch_size = ({'1, 1, 1' if patch is None else '1, patch_size, patch_size'}){note}"
    yield f"self.in_channels = {_known(_IN, known) or f'16  {CHECK}channels of the latents'}"
    if out := _known(_OUT, known):
        yield f"self.out_channels = {out}{' or self.in_channels' if known[out].default == 'None' else ''}"
    yield f"self.text_dim = {_known(TEXT_WIDTHS, known) or f'4096  {CHECK}width of the text encoder'}"
    if length is not None:
        yield f'self.text_padding = ("fixed", {length})'


def _arguments(forward: list[Argument], listed: bool) -> Iterator[str]:
    """The arguments of the model's forward: those that are known, then the others for the user."""
    latents, timestep, text, mask = (_first(forward, each) for each in (_LATENTS, _TIMESTEP, _TEXT, _MASK))
    for argument, what in ((latents, "latents"), (timestep, "timestep")):
        if argument is None:
            yield f"{CHECK}none of forward's arguments has a name of the {what}: pass {what} to one"
    if text is None:
        yield f"{CHECK}none of forward's arguments has a name of the text's states: they are not used"
    for argument in forward:
        name = argument.name
        if argument is latents:
            each = "[*latents]" if _is_list(argument) else "latents"
            yield f"{name}={each},  {CHECK}[B,C,T,H,W]; rearrange them if the class takes another layout"
        elif argument is timestep:
            yield f"{name}=timestep,  {CHECK}float32 [B], 0 (clean) to 1000; divide it if it takes 0 to 1"
        elif argument is text and listed:
            rows = "[row[:n] for row, n in zip(text, text_lengths, strict=True)]"
            yield f"{name}={rows},  {CHECK}each caption's own tokens"
        elif argument is text:
            yield f"{name}=text,  # [B,L,D]"
        elif argument is mask:
            yield f"{name}=text_mask,  {CHECK}bool [B,L], true for tokens: convert it if it takes another one"
        elif name == "return_dict":
            yield "return_dict=False,"
        elif name in _PASSED:
            yield f"{name}={name},  {CHECK}float32 [B]; its scale is that of your class"
        elif argument.default is None:
            yield f"{name}=None,  {CHECK}a required argument whose name is not known"
        else:
            yield f"# {name}={argument.default},"


def _first(arguments: Iterable[Argument], names: Iterable[str]) -> Argument | None:
    """The argument with the surest of these names."""
    known = {argument.name.lower(): argument for argument in arguments}
    return next((known[name] for name in names if name in known), None)


def _is_list(argument: Argument | None) -> bool:
    """Whether an argument is a list with one tensor for each sample."""
    return argument is not None and "list" in (argument.annotation or argument.foreign or "").lower()


def _returns_several(method: ast.FunctionDef) -> bool:
    """Whether a forward returns a tuple, or an object of Diffusers whose first item is the prediction."""
    values = [node.value for node in ast.walk(method) if isinstance(node, ast.Return) and node.value]
    return "return_dict" in ast.unparse(method.args) or any(
        isinstance(value, ast.Tuple) or "Output(" in ast.unparse(value) for value in values
    )


# -- datasets ------------------------------------------------------------------------------------


def _dataset(own: OwnClass) -> tuple[ComponentKind, dict[str, str]]:
    fields = own.arguments("__init__")
    kept = [field for field in fields if field.is_key]
    source = "\n".join(ast.unparse(node) for node in own.body)
    target = f"{own.name}Clips"
    method = own.method("__getitem__")
    assert method is not None  # or it would be no dataset
    clip, clip_note = _item(method, _CLIP, _CAPTION, 0, "the clip")
    caption, caption_note = _item(method, _CAPTION, _CLIP, -1, "the caption")
    known = _returned(method)
    name, rate = _known(_ID, known), _known(_FPS, known)
    permuted = re.findall(r"permute\(([\d, ]+)\)", source)
    words = {
        **_words(own, target, kept, "            {0}={0},"),
        "parameters": indent("\n".join(_parameters(own, fields)) or "", " " * 8),
        "layout": _LAYOUTS.get(permuted[-1].replace(" ", "") if permuted else "", "f c y x"),
        "range": _range(source),
        "clip": clip,
        "clip_note": clip_note,
        "caption": caption,
        "caption_note": caption_note,
        "id": f'f"{own.name} {{index}}"' if name is None else f'str(sample["{name}"])',
        "fps": f'float(sample["{rate}"]),' if rate else f"8.0,  {CHECK}frames per second of a clip",
    }
    small = {field.name: _CLIPS[field.name] for field in kept if field.name in _CLIPS}
    found = replace(
        COMPONENT_KINDS["dataset"],
        target=target,
        tiny=small | _required(kept, small),
        run={"data.train": f"\ntype: $type\n{_yaml(kept, small)}"},
        about="and a small model",
    )
    return found, words


def _returned(method: ast.FunctionDef) -> list[str]:
    """The keys in a `__getitem__` that returns dictionaries."""
    found: list[object] = []
    for node in ast.walk(method):
        if isinstance(node, ast.Dict):
            found += [key.value for key in node.keys if isinstance(key, ast.Constant)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
            found += [keyword.arg for keyword in node.keywords]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found += [node.slice.value] if isinstance(node.slice, ast.Constant) else []
    return [key for key in found if isinstance(key, str)]


def _item(
    method: ast.FunctionDef, keys: Sequence[str], others: Sequence[str], place: int, what: str
) -> tuple[str, str]:
    """The key of a sample's clip or caption, and a note where it is a guess."""
    returns = [node.value for node in ast.walk(method) if isinstance(node, ast.Return)]
    if pairs := [value for value in returns if isinstance(value, ast.Tuple)]:
        names = [item.id if isinstance(item, ast.Name) else "" for item in pairs[0].elts]
        if key := _known(keys, names):
            return str(names.index(key)), ""
        free = [number for number, name in enumerate(names) if name not in others]
        return str(free[place] if free else 0), f"  {CHECK}the place of {what} in the tuple"
    known = _returned(method)
    if key := _known(keys, known):
        return f'"{key}"', ""
    seen = ", ".join(known) or "not known"
    return f'"{keys[0]}"', f"  {CHECK}the key of {what}; those of a sample are {seen}"


def _range(source: str) -> str:
    """The values of black and white in the clips of a dataset, from the constants in its code."""
    if re.search(r"127\.5|Normalize\(|\* 2(\.0)? - 1|\b2(\.0)? \* .* - 1", source):
        return "(-1.0, 1.0)"
    return "(0.0, 1.0)" if re.search(r"/ 255|ToTensor\(", source) else "(0.0, 255.0)"


# -- both ----------------------------------------------------------------------------------------


def _known(names: Iterable[str], known: Collection[str]) -> str | None:
    """The surest of the names that are known."""
    return next((name for name in names if name in known), None)


def _words(own: OwnClass, target: str, kept: Iterable[Argument], line: str) -> dict[str, str]:
    return {
        "name": own.name,
        "module": own.module,
        "target": target,
        "notes": "".join(f"\n{CHECK}{note}" for note in own.notes),
        "fields": "\n".join(line.format(field.name) for field in kept),
    }


def _parameters(own: OwnClass, fields: Iterable[Argument]) -> Iterator[str]:
    """The constructor's arguments, which are the keys of the YAML; those without a default come first."""
    if own.open_arguments("__init__"):
        yield f"{CHECK}{own.name} also takes *args or **kwargs: they are no keys; add those that you set"
    for field in sorted(fields, key=lambda field: field.default is not None):
        text, equals = (f"{field.name}: {field.annotation}", " = ") if field.annotation else (field.name, "=")
        text += "," if field.default is None else f"{equals}{field.default},"
        if field.foreign is None:
            yield f"{text}  # {field.comment or f'as in {own.name}'}"
        elif field.default is None:
            yield f"{text}  {CHECK}a value of the YAML arrives here: make a {field.foreign} of it below"
        else:
            yield f"{CHECK}{field.name} is no key and keeps its default: no YAML value is {field.foreign}"


def _yaml(fields: Iterable[Argument], small: Mapping[str, object]) -> str:
    """The fields with small values, or the class's defaults."""
    lines = []
    for field in fields:
        default = json.dumps(field.value) if field.default is not None else None
        if default is not None and isinstance(field.value, float) and "." not in default:
            default = default.replace("e", ".0e")  # a number in every version of YAML
        value = default
        if field.name in small and small[field.name] != field.value:
            value = f"{json.dumps(small[field.name])}  # {default or 'none'} in the class"
        lines.append(f"{field.name}: {value or f'{CHECK}a value that the class requires'}")
    return "\n".join(lines)


def _required(fields: Iterable[Argument], given: Mapping[str, object]) -> dict[str, object]:
    """Fields of a small instance that only the user knows."""
    lacking = [field.name for field in fields if field.default is None and field.name not in given]
    return dict.fromkeys(lacking, f"{MARK}a value of a small instance")


def _filled(kind: str, words: Mapping[str, str]) -> str:
    """The text of the component's module."""
    template = (files("mm_core.plugin.scaffold") / "templates/own" / f"{kind}.py.txt").read_text("utf-8")
    used = {name for line in words["parameters"].splitlines() for name in re.findall(r"\b[A-Z]\w+", line)}
    typed = sorted(used & TYPING)
    typing = f"\nfrom typing import {', '.join(typed)}\n" if typed else ""
    return Template(template).substitute(words, typing=typing)
