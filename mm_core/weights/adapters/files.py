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
from mm_core.weights.adapters.comfyui import (
    ADDED,
    TARGETS,
    is_pair,
    leaves_out,
    notes_on,
    product,
    replaced,
)
from mm_core.weights.adapters.kinds import PEFT_TYPES, by_module, change_of, is_whole, kind_of, rank_of
from mm_core.weights.adapters.settings import (
    alpha_in,
    check_doras,
    check_settings,
    config_beside,
    header_settings,
    rank_in,
)
from mm_core.weights.adapters.stored_names import stored_module
from mm_core.weights.formats.format import AdapterLayout, Layout, StoredTensors
from mm_core.weights.formats.key_map import Copy, KeyMap
from mm_core.weights.formats.libraries import PEFT_ADAPTER
from mm_core.weights.stored import SafetensorsFiles

DIFFUSERS_ADAPTER = "pytorch_lora_weights.safetensors"
PART = "mm_core.part"
"""Header text of an adapter's file: the part of the component (an expert) that it belongs to."""
_FLAT = ("lora_unet__", "lora_unet_", "lora_transformer_")  # kohya's scripts: then dots are underscores
TEXT_ENCODER = "lora_te"  # kohya's scripts: a text encoder's modules, beside those of the model
_DOTTED = ("base_model.model.", "transformer.", "diffusion_model.", "model.diffusion_model.", "pipe.dit.")
_PREFIXES = (*_DOTTED, *_FLAT, "")
_PARTS = {
    "lora_down": "lora_A", "lora_up": "lora_B", "lora.down": "lora_A", "lora.up": "lora_B",
}  # fmt: skip
"""Other programs' names of the factors."""
_KEY = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector|lora[._](?:down|up)"
    r"|dora_scale|lokr_w[12](?:_[ab])?|hada_w[12]_[ab])"
    r"(\.(?!(bias|weight)\Z)[\w-]+)?(\.weight)?\Z"
)
_ALPHA = re.compile(r"(?P<module>.+)\.alpha\Z")


@dataclass(frozen=True)
class AdapterScale:
    """Rank and scale of a module's adapter, as in PEFT's configs; its kind: lora, lokr or loha."""

    rank: int
    alpha: float
    dora: bool = False
    rslora: bool = False
    kind: str = "lora"

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
        added: stored path of a tensor of the model -> stored name of what the file adds to it; for the LoRA
            of a convolution, of its second factor.
        products: stored name of such a second factor -> that of the first, and the scale of their product.
        notes: sentences for the log on tensors that are not applied as their names suggest.
    """

    stored: StoredTensors
    keys: Mapping[tuple[str, str], str]
    scales: Mapping[str, AdapterScale]
    flat: bool = False
    added: Mapping[str, str] = field(default_factory=dict)
    products: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def added_shape(self, key: str) -> tuple[int, ...]:
        """The shape of what is added under a name of `added`."""
        shapes = self.stored.shapes
        pair = self.products.get(key)
        return tuple(shapes[key]) if pair is None else (shapes[key][0], *shapes[pair[0]][1:])

    def read_added(self, key: str, box: tuple[slice, ...]) -> Tensor:
        """A box of what is added under a name of `added`."""
        if (pair := self.products.get(key)) is None:
            return self.stored.read(key, box)
        return pair[1] * product(self.stored, (pair[0], key), box)

    def read(self, module: str, part: str) -> Tensor:
        """A part of a module's adapter, in float32."""
        key = self.keys[module, part]
        return self.stored.read(key, tuple(slice(0, size) for size in self.stored.shapes[key])).float()

    def change(self, module: str, rows: slice) -> Tensor:
        """Rows of the scaled change [out, in] of a module's weight by its LoRA."""
        pair = self.keys[module, "lora_A"], self.keys[module, "lora_B"]
        columns = slice(0, self.stored.shapes[pair[0]][1])
        return self.scales[module].factor * product(self.stored, pair, (rows, columns))


def open_adapter(path: Path, beside: Collection[str] = ()) -> AdapterFile:
    """Opens an adapter (LoRA, DoRA) file or folder of PEFT, Diffusers, ComfyUI or kohya's scripts.

    PEFT: adapter_model.safetensors with adapter_config.json. Diffusers: pytorch_lora_weights.safetensors,
    with its settings in the header. Others: any safetensors file with such keys, or with `lora_down`,
    `lora_up` and `alpha`, which takes precedence over all settings. Without any setting, the scale is 1.
    Tensors with the stored names `beside` are left out.

    Raises:
        CheckpointError: no such file, a pickle, a different kind of adapter, keys that are not a LoRA's.
    """
    file, settings = _find(path)
    stored = SafetensorsFiles(file, [file])
    texts = stored.metadata()
    if not settings and "lora_adapter_metadata" in texts:
        settings = header_settings(texts["lora_adapter_metadata"], file)
    check_settings(settings, path, bool(beside))
    start = next(p for p in _PREFIXES if all(name.startswith((p, TEXT_ENCODER)) for name in stored.shapes))
    shapes = {name: shape for name, shape in stored.shapes.items() if name not in beside}
    keys, alphas, added, notes = _keys(stored, shapes, start, file)
    sizes = {m: {p: stored.shapes[keys[m, p]] for p in parts} for m, parts in by_module(keys).items()}
    scales: dict[str, AdapterScale] = {}
    for module, parts in sizes.items():
        scales[module] = _scale(module, parts, settings, alphas, file)
    own = {module: "lora_magnitude_vector" in parts for module, parts in sizes.items()}
    check_doras(settings, own, file)
    products = {}
    for module in [module for module in scales if is_pair(keys, module, stored.shapes)]:
        first, second = keys.pop((module, "lora_A")), keys.pop((module, "lora_B"))
        products[second] = first, scales.pop(module).factor
        added[f"{module}.weight"] = second
    return AdapterFile(stored, keys, scales, start in _FLAT, added, products, notes)


def _scale(
    module: str,
    shapes: Mapping[str, Sequence[int]],
    settings: Mapping[str, object],
    alphas: Mapping[str, float],
    file: Path,
) -> AdapterScale:
    """Rank and scale of a module, of the shapes of its parts."""
    rank = rank_of(shapes)
    if is_whole(shapes):  # PEFT scales it by its settings, other programs by 1 whatever `alpha` is
        if settings and module not in alphas:
            rank = rank_in(module, settings, file)
        else:
            alphas = {module: float(rank)}
    over = shapes["lokr_w1_b"][0] if {"lokr_w1_b", "lokr_w2"} <= {*shapes} else rank
    alpha = alpha_in(module, settings, over, alphas, file)
    alpha = alpha if over == rank else alpha * rank / over
    dora = not {"lora_magnitude_vector", "dora_scale"}.isdisjoint(shapes)
    return AdapterScale(rank, alpha, dora, bool(settings.get("use_rslora")), kind_of(shapes) or "")


def _keys(
    stored: StoredTensors, shapes: Mapping[str, Sequence[int]], start: str, file: Path
) -> tuple[dict[tuple[str, str], str], dict[str, float], dict[str, str], tuple[str, ...]]:
    """(module, part) -> stored name; the alphas in the file, its additions to the model's tensors, and notes.

    `start` is the prefix of the model's names, `shapes` has the tensors to read.
    """
    added: dict[str, str] = {}
    keys: dict[tuple[str, str], str] = {}
    alphas: dict[str, float] = {}
    strange, left = [], []
    _check_dtypes({name: stored.dtypes[name] for name in shapes}, file)
    for name, shape in shapes.items():
        bare = name.removeprefix(start)
        if start in _FLAT:  # some programs leave the dots behind the block's number
            module, *end = re.split(r"\.(?=(?:lora_|lokr_|hada_|alpha\Z|diff|[wb]_norm))", bare, maxsplit=1)
            bare = ".".join([module.replace(".", "_"), *end])
        found, scaled = _KEY.match(bare), _ALPHA.match(bare)
        if scaled is not None and prod(shape) == 1:
            alphas[scaled["module"]] = float(stored.read(name, tuple(slice(0, 1) for _ in shape)))
        elif leaves_out(bare, start):
            left.append(name)
        elif (more := ADDED.match(bare)) is not None and f"{more[1]}.{TARGETS[more['part']]}" not in added:
            added[f"{more[1]}.{TARGETS[more['part']]}"] = name
        elif found is not None and _fits(place := _place(found), shape, start) and place not in keys:
            keys[place] = name
        else:
            strange.append(name)
    modules = by_module(keys)
    strange += [f"{start}{module}.alpha" for module in alphas if module not in modules]
    pairs = {module for module in modules if is_pair(keys, module, shapes)}
    strange += [name for (m, part), name in keys.items() if m not in pairs and len(shapes[name]) > 2]
    lone = [module for module, parts in modules.items() if kind_of(parts) is None]
    if strange or lone or not (modules or added):
        odd = strange or [f"{module} (one of its two matrices)" for module in lone] or ["nothing"]
        raise CheckpointError(
            f"this is not a LoRA of linear layers: it contains {', '.join(odd[:3])}",
            where=str(file),
            accepted="for each module lora_A and lora_B, for DoRA lora_magnitude_vector or ComfyUI's"
            " dora_scale [out, 1], or a LoKr or LoHa; additions to tensors (diff, diff_b)",
            hint="adapters of embeddings and other forms: merge them into the base weights with PEFT",
        )
    dropped = replaced(keys, added)
    kept = {(module, part): name for (module, part), name in keys.items() if module not in dropped}
    return kept, alphas, added, notes_on(left, dropped, added)


def _place(found: re.Match[str]) -> tuple[str, str]:
    """(module, part) of a name that `_KEY` matches."""
    return found["module"], _PARTS.get(found["part"], found["part"])


def _fits(place: tuple[str, str], shape: Sequence[int], start: str) -> bool:
    """Whether a part can have this shape. LyCORIS's `dora_scale`, in kohya's names, means something else."""
    if place[1] == "lora_magnitude_vector":
        return True
    if place[1] == "dora_scale":
        return len(shape) == 2 and shape[1] == 1 and start not in _FLAT
    return 0 not in shape and (len(shape) == 2 or (len(shape) > 2 and place[1] in ("lora_A", "lora_B")))


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
    if len({scale.dora for scale in scales.values()}) > 1 and not layout.additions:
        raise ContractError(
            "some modules of this adapter have a DoRA and some have not, which this layout cannot express",
            accepted="lora/comfyui",
            hint="export merged weights (--merge-lora)",
        )
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
