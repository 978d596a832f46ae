"""Adapter files in the forms of PEFT and Diffusers, and merging adapters into the weights."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePath

import torch
from torch import Tensor

from mm_core.errors import CheckpointError, ContractError
from mm_core.modules.adapter_layers import row_lengths
from mm_core.weights.adapters.kinds import (
    PEFT_TYPES,
    Blocks,
    blocks_in,
    by_module,
    change_of,
    is_whole,
    kind_of,
    peft_factor,
    rank_of,
    weight_of,
)
from mm_core.weights.adapters.settings import (
    alpha_in,
    check_doras,
    check_settings,
    config_beside,
    header_settings,
    plain_name,
    rank_in,
)
from mm_core.weights.formats.format import AdapterLayout, Layout, StoredTensors
from mm_core.weights.formats.key_map import Copy, KeyMap, Shape
from mm_core.weights.formats.libraries import PEFT_ADAPTER
from mm_core.weights.stored import SafetensorsFiles

DIFFUSERS_ADAPTER = "pytorch_lora_weights.safetensors"
PART = "mm_core.part"
"""Header text of an adapter's file: the part of the component (an expert) that it belongs to."""
# kohya's scripts and LyCORIS: then dots are underscores
_FLAT = ("lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_")
TEXT_ENCODER = "lora_te"  # kohya's scripts: a text encoder's modules, beside those of the model
_DOTTED = ("base_model.model.", "transformer.", "diffusion_model.", "model.diffusion_model.", "pipe.dit.")
_PREFIXES = (*_DOTTED, *_FLAT, "")
_PARTS = {
    "lora_down": "lora_A", "lora_up": "lora_B", "lora.down": "lora_A", "lora.up": "lora_B",
}  # fmt: skip
"""Other programs' names of the factors."""
_KEY = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector|lora[._](?:down|up)"
    r"|lokr_w[12](?:_[ab])?|hada_w[12]_[ab])"
    r"(\.(?!(bias|weight)\Z)[\w-]+)?(\.weight)?\Z"
)
_ALPHA = re.compile(r"(?P<module>.+)\.alpha\Z")
_ADDED = re.compile(r"(?P<module>.+)\.(?P<part>diff|diff_b|diff_m)\Z")
_TARGETS = {"diff": "weight", "diff_b": "bias", "diff_m": "modulation"}
"""ComfyUI's additions to a module's own tensors."""


@dataclass(frozen=True)
class AdapterScale:
    """Rank and scale of a module's adapter, as in PEFT's configs; its kind: lora, lokr or loha.

    `blocks` are the sizes of a LoKr's matrices; None: the nearest factors.
    """

    rank: int
    alpha: float
    dora: bool = False
    rslora: bool = False
    kind: str = "lora"
    blocks: Blocks | None = None

    @property
    def factor(self) -> float:
        """The number that multiplies the product of the adapter's two matrices."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True)
class AdapterFile:
    """An adapter (LoRA, DoRA) on disk.

    Attributes:
        stored: the file's tensors.
        keys: (module's stored path, part) -> stored name.
        scales: rank and scale by stored module, in the file's order.
        flat: whether module paths in the file have underscores in place of dots.
        added: stored path of a tensor of the model -> stored name of what the file adds to it.
    """

    stored: StoredTensors
    keys: Mapping[tuple[str, str], str]
    scales: Mapping[str, AdapterScale]
    flat: bool = False
    added: Mapping[str, str] = field(default_factory=dict)

    def weights(self) -> dict[str, Shape]:
        """The shapes of the weights that the file changes, by stored name."""
        parts = by_module(self.keys)
        sizes = {m: {part: self.stored.shapes[self.keys[m, part]] for part in parts[m]} for m in parts}
        return {f"{module}.weight": weight_of(held) for module, held in sizes.items()}


def open_adapter(path: Path, beside: Collection[str] = (), within: str = "") -> AdapterFile:
    """Opens an adapter (LoRA, DoRA) file or folder of PEFT, Diffusers, ComfyUI or kohya's scripts.

    PEFT: adapter_model.safetensors with adapter_config.json. Diffusers: pytorch_lora_weights.safetensors,
    with its settings in the header. Others: any safetensors file with such keys, or with `lora_down`,
    `lora_up` and `alpha`, which takes precedence over all settings. Without any setting, the scale is 1.
    Tensors with the stored names `beside` are left out, and those whose names do not begin with `within`.

    Raises:
        CheckpointError: no such file, a pickle, a different kind of adapter, keys that are not a LoRA's.
    """
    file, settings = _find(path)
    stored = SafetensorsFiles(file, [file])
    held = {n: shape for n, shape in stored.shapes.items() if plain_name(n).startswith(within)}
    start = within + start_of_keys(plain_name(name).removeprefix(within) for name in held)
    texts = stored.metadata()
    if not settings and "lora_adapter_metadata" in texts:
        settings = header_settings(texts["lora_adapter_metadata"], file, start)
    check_settings(settings, path, bool(beside))
    shapes = {name: shape for name, shape in held.items() if name not in beside}
    keys, alphas, added = _keys(stored, shapes, start, file)
    scales: dict[str, AdapterScale] = {}
    for module, parts in by_module(keys).items():
        sizes = {part: stored.shapes[keys[module, part]] for part in parts}
        rank, own = rank_of(sizes), alphas
        if is_whole(parts):  # PEFT scales it by its settings, other programs by 1 whatever `alpha` is
            if settings and module not in alphas:
                rank = rank_in(module, settings, file)
            else:
                own = {module: float(rank)}
        alpha = alpha_in(module, settings, rank, own, file)
        dora, rslora = "lora_magnitude_vector" in parts, bool(settings.get("use_rslora"))
        kind = kind_of(parts) or ""
        blocks = blocks_in(sizes) if kind == "lokr" else None
        scales[module] = AdapterScale(rank, alpha, dora, rslora, kind, blocks)
    check_doras(settings, {module: scale.dora for module, scale in scales.items()}, file)
    return AdapterFile(stored, keys, scales, start in _FLAT, added)


def start_of_keys(names: Iterable[str]) -> str:
    """What a program puts before the model's names in all keys of a file."""
    known = [*names]
    return next(p for p in _PREFIXES if all(name.startswith((p, TEXT_ENCODER)) for name in known))


def _keys(
    stored: StoredTensors, shapes: Mapping[str, Sequence[int]], start: str, file: Path
) -> tuple[dict[tuple[str, str], str], dict[str, float], dict[str, str]]:
    """(module, part) -> stored name, the alphas in the file, and its additions to tensors of the model.

    `start` is the prefix of the model's names, `shapes` has the tensors to read.
    """
    added: dict[str, str] = {}
    keys: dict[tuple[str, str], str] = {}
    alphas: dict[str, float] = {}
    strange = []
    _check_dtypes({name: stored.dtypes[name] for name in shapes}, file)
    for name, shape in shapes.items():
        bare = plain_name(name).removeprefix(start)
        if start in _FLAT:  # some programs leave the dots behind the block's number
            module, *end = re.split(r"\.(?=(?:lora_|lokr_|hada_|alpha\Z|diff))", bare, maxsplit=1)
            bare = ".".join([module.replace(".", "_"), *end])
        found, scaled = _KEY.match(bare), _ALPHA.match(bare)
        if scaled is not None and prod(shape) == 1:
            alphas[scaled["module"]] = float(stored.read(name, tuple(slice(0, 1) for _ in shape)))
            continue
        if (more := _ADDED.match(bare)) is not None:
            added[f"{more['module']}.{_TARGETS[more['part']]}"] = name
            continue
        place = (found["module"], _PARTS.get(found["part"], found["part"])) if found else None
        factor = place is not None and place[1] != "lora_magnitude_vector"
        if place is None or place in keys or (factor and (len(shape) != 2 or 0 in shape)):
            strange.append(name)
        else:
            keys[place] = name
    modules = by_module(keys)
    strange += [f"{start}{module}.alpha" for module in alphas if module not in modules]
    lone = [module for module, parts in modules.items() if kind_of(parts) is None]
    if strange or lone or not modules:
        odd = strange or [f"{module} (one of its two matrices)" for module in lone] or ["nothing"]
        raise CheckpointError(
            f"this is not a LoRA of linear layers: it contains {', '.join(odd[:3])}",
            where=str(file),
            accepted="for each module lora_A and lora_B, for DoRA lora_magnitude_vector, or a LoKr or LoHa",
            hint="adapters of convolutions and embeddings: merge them into the base weights with PEFT",
        )
    return keys, alphas, added


def _check_dtypes(dtypes: Mapping[str, torch.dtype], file: Path) -> None:
    """CheckpointError for tensors that are no real numbers, or codes of some; an alpha may be an integer."""
    for name, kind in dtypes.items():
        whole = _ALPHA.match(name) and not kind.is_complex and kind != torch.bool
        if not (kind.is_floating_point or whole):
            raise CheckpointError(
                f"{name} has the dtype {str(kind).removeprefix('torch.')}",
                where=str(file),
                accepted="tensors of floating-point numbers",
                hint="get the adapter in one of these dtypes: a quantised one has lost its scales",
            )


def _find(path: Path) -> tuple[Path, Mapping[str, object]]:
    if path.is_file() and path.suffix == ".safetensors":
        return path, config_beside(path) if path.name == PEFT_ADAPTER else {}
    if (path / PEFT_ADAPTER).is_file():
        return path / PEFT_ADAPTER, config_beside(path / PEFT_ADAPTER)
    if (path / DIFFUSERS_ADAPTER).is_file():
        return path / DIFFUSERS_ADAPTER, {}
    pickled = [f for f in ("adapter_model.bin", "pytorch_lora_weights.bin") if (path / f).is_file()]
    what = "there is no such adapter"
    if pickled:
        what = f"this adapter is a pickle file, which can run code: {pickled[0]}"
    elif path.exists():
        what = "there is no adapter here"
    raise CheckpointError(
        what, where=str(path), accepted=f"{PEFT_ADAPTER} or {DIFFUSERS_ADAPTER}, or a folder with one"
    )


# -- out -----------------------------------------------------------------------------------------


def is_adapter(path: Path) -> bool:
    """Whether a path is an adapter file (LoRA) or a folder with one, by file names only."""
    return any((path / name).is_file() or path.name == name for name in (PEFT_ADAPTER, DIFFUSERS_ADAPTER))


def stored_module(layout: AdapterLayout, module: str) -> str:
    """The path of an adapted module in the model's own library.

    Raises:
        ContractError: the format stores the module's weight in a different form, so an adapter cannot apply.
    """
    stored = layout.keys.renamed(f"{module}.weight")
    if stored is None or not stored.endswith(".weight"):
        raise ContractError(
            f"the adapter of {module} cannot be written: the model's own library splits, reshapes or joins"
            " its weight, and an adapter belongs to a whole one",
            hint="export merged weights (--merge-lora), or leave the module out of the adapter's targets",
        )
    return stored.removesuffix(".weight")


def stored_key(layout: AdapterLayout, module: str, part: str) -> str:
    """The name of an adapter's tensor in an adapter file."""
    if part == "lora_magnitude_vector":
        if layout.alphas:
            raise ContractError(
                f"the adapter of {module} is a DoRA, which this layout does not store",
                accepted="lora/diffusers, lora/peft",
                hint="export in one of these, or merged weights (--merge-lora)",
            )
        return f"{layout.module_prefix}{stored_module(layout, module)}.{part}"
    if part not in ("lora_A", "lora_B"):
        if layout.metadata_key is not None:
            raise ContractError(
                f"the adapter of {module} is a LoKr or LoHa, which Diffusers does not load",
                accepted="lora/comfyui, lora/kohya, lora/peft",
                hint="export in one of these, or merged weights (--merge-lora)",
            )
        return f"{module_key(layout, module)}.{part}"
    name = layout.factors[part == "lora_B"]
    return f"{module_key(layout, module)}.{name}.weight"


def module_key(layout: AdapterLayout, module: str) -> str:
    """The name of an adapted module in an adapter file, at the start of its tensors' names."""
    stored = stored_module(layout, module)
    return f"{layout.module_prefix}{stored.replace('.', '_') if layout.flat else stored}"


def beside_key(layout: AdapterLayout, module: str, name: str) -> str:
    """The name in an adapter file of a tensor that is trained in full beside the adapter.

    Raises:
        ContractError: the format stores the tensor in a different form.
    """
    stored = layout.keys.renamed(name)
    if stored != f"{stored_module(layout, module)}{name.removeprefix(module)}":
        raise ContractError(
            f"{name} cannot be written beside an adapter: this format stores it in a different form",
            hint="export merged weights (--merge-lora)",
        )
    return f"{layout.module_prefix}{stored}"


def adapter_files(
    layout: AdapterLayout,
    placed: Mapping[str, tuple[Copy, ...]],
    scales: Mapping[str, AdapterScale],
    beside: Sequence[str],
    folder: str,
) -> Layout:
    """The layout of one adapter's file, for an export.

    Args:
        layout: the format's layout of the component's adapters.
        placed: the file's tensors, by name.
        scales: rank and scale of the adapted modules.
        beside: modules that the file contains in full.
        folder: folder that contains `layout.file`.
    """
    settings = peft_settings(layout, scales, beside)
    texts, metadata = {}, {"format": "pt", **layout.texts}
    if layout.config is not None:
        texts[layout.config] = json.dumps(settings, indent=2) + "\n"
    if layout.metadata_key is not None:
        held = {f"{layout.module_prefix}{key}": settings[key] for key in scale_settings(scales)}
        metadata[layout.metadata_key] = json.dumps(held, indent=2, sort_keys=True)
    file = PurePath(folder, layout.file)
    keys, stem = KeyMap(placed=placed), file.name.removesuffix(".safetensors")
    about = (layout.library, layout.loading, layout.part)
    return Layout(keys, str(file.parent), stem, texts, metadata, *about)


def peft_settings(
    layout: AdapterLayout, scales: Mapping[str, AdapterScale], beside: Sequence[str] = ()
) -> dict[str, object]:
    """The content of an adapter's adapter_config.json: PEFT's LoraConfig.

    Args:
        layout: the format's layout of the component's adapters.
        scales: rank and scale of the adapted modules, by path in the component.
        beside: modules that the file contains in full.
    """
    names = {stored_module(layout, module): scale for module, scale in scales.items()}
    kind = next(iter(scales.values())).kind
    only_lora = {"bias": "none", "fan_in_fan_out": False, "init_lora_weights": True, "lora_dropout": 0.0}
    return {
        "peft_type": PEFT_TYPES[kind],
        "base_model_name_or_path": None,
        "task_type": None,
        "inference_mode": True,
        **(only_lora if kind == "lora" else {"init_weights": True}),
        **(
            {"decompose_factor": peft_factor(s.blocks for s in scales.values() if s.blocks)}
            if kind == "lokr"
            else {}
        ),
        "modules_to_save": [stored_module(layout, module) for module in beside] or None,
        **scale_settings(names),
    }


def scale_settings(scales: Mapping[str, AdapterScale]) -> dict[str, object]:
    """The fields of PEFT's config for an adapter's modules, ranks and scales."""
    first = next(iter(scales.values()))
    ranks = {_whole_pattern(name): s.rank for name, s in scales.items() if s.rank != first.rank}
    alphas = {_whole_pattern(name): _plain(s.alpha) for name, s in scales.items() if s.alpha != first.alpha}
    only_lora = {"use_dora": first.dora, "use_rslora": first.rslora}
    return {
        "r": first.rank,
        "lora_alpha" if first.kind == "lora" else "alpha": _plain(first.alpha),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        **(only_lora if first.kind == "lora" else {}),
        "target_modules": sorted(scales),
    }


def _whole_pattern(name: str) -> str:
    """A PEFT pattern for this module only: without the `^` it would also match the end of other paths."""
    return f"^{re.escape(name)}"


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def merge(weight: Tensor, adapters: Iterable[tuple[AdapterScale, Mapping[str, Tensor]]]) -> Tensor:
    """Merges adapters (LoRA, DoRA) into a linear layer's weight, as PEFT's layer computes with all of them.

    Args:
        weight: [out, in].
        adapters: in config order; the scale of each, and its tensors by part: lora_A [rank, in], lora_B
            [out, rank], lora_magnitude_vector [out] for DoRA; or those of a LoKr or LoHa.

    Returns:
        [out, in] float32. LoRA: W + f B A. DoRA (https://arxiv.org/abs/2402.09353, eq. 5) scales the result
        of the adapters before it, by row lengths of the weight plus its own change only.
    """
    weight = total = weight.float()
    for scale, parts in adapters:
        changed = weight + scale.factor * change_of(parts)
        total = changed if total is weight else total + (changed - weight)
        if scale.dora:
            total = total * (parts["lora_magnitude_vector"].float() / row_lengths(changed))[:, None]
    return total
