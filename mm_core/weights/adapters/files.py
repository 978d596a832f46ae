"""Adapter files in the forms of PEFT and Diffusers, and merging adapters into the weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mm_core.errors import CheckpointError
from mm_core.modules.adapter_layers import row_lengths
from mm_core.weights.adapters.comfyui import (
    ADDED,
    TARGETS,
    is_pair,
    leaves_out,
    magnitude_of,
    notes_on,
    product,
    replaced,
)
from mm_core.weights.adapters.kinds import (
    Blocks,
    blocks_in,
    by_module,
    change_of,
    is_whole,
    kind_of,
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
from mm_core.weights.formats.format import StoredTensors
from mm_core.weights.formats.key_map import Shape
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
    r"|dora_scale|lokr_w[12](?:_[ab])?|hada_w[12]_[ab])"
    r"(\.(?!(bias|weight)\Z)[\w-]+)?(\.weight)?\Z"
)
_ALPHA = re.compile(r"(?P<module>.+)\.alpha\Z")


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

    def magnitude(self, module: str, weight: Tensor, rows: slice) -> Tensor:
        """Rows of a DoRA's magnitudes by the module's `dora_scale`, of these rows of its weight."""
        pair = self.keys[module, "lora_A"], self.keys[module, "lora_B"]
        columns = slice(0, self.stored.shapes[pair[0]][1])
        change = self.scales[module].factor * product(self.stored, pair, (rows, columns))
        return magnitude_of(self.read(module, "dora_scale")[rows], weight, change)

    def computed_shape(self, module: str) -> Shape:
        """The shape of the magnitudes, or of the first matrix of a LoKr that is a product."""
        shapes = self.sizes[module]
        return (shapes["dora_scale"][0],) if "dora_scale" in shapes else blocks_in(shapes)[:2]

    @cached_property
    def sizes(self) -> dict[str, dict[str, Shape]]:
        """The shapes of each module's parts."""
        return by_module(self.keys, self.stored.shapes)

    def cut(self, shares: Iterable[tuple[str, range]]) -> AdapterFile:
        """The file with a LoRA of some rows of a module's weight, called as by `share_name`, for each share
        (module, rows), in place of the module's own."""
        keys, scales, rows = dict(self.keys), dict(self.scales), {}
        for module, held in shares:
            name, second = share_name(module, held), self.keys[module, "lora_B"]
            keys[name, "lora_A"] = self.keys[module, "lora_A"]
            keys[name, "lora_B"] = share_name(second, held)
            scales[name] = self.scales[module]
            rows[share_name(second, held)] = second, held
            for part in ("lora_A", "lora_B"):
                keys.pop((module, part), None)
            scales.pop(module, None)
        return replace(self, stored=_Rows(self.stored, rows), keys=keys, scales=scales)

    def weights(self) -> dict[str, Shape]:
        """The shapes of the weights that the file changes, by stored name."""
        return {f"{module}.weight": weight_of(parts) for module, parts in self.sizes.items()}


def share_name(name: str, rows: range) -> str:
    """The name of rows of a stored weight or matrix."""
    return f"{name}:{rows.start}"


class _Rows:
    """Stored tensors, and rows of some under further names. Satisfies `StoredTensors`."""

    def __init__(self, stored: StoredTensors, rows: Mapping[str, tuple[str, range]]) -> None:
        self._stored, self._rows = stored, rows
        self.where, self.others = stored.where, stored.others
        sizes = {name: (len(held), *stored.shapes[key][1:]) for name, (key, held) in rows.items()}
        self.shapes = {**stored.shapes, **sizes}
        self.dtypes = {**stored.dtypes, **{name: stored.dtypes[key] for name, (key, _) in rows.items()}}

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        key, held = self._rows.get(name, (name, None))
        if held is not None:
            here = held[box[0]]
            box = (slice(here.start, here.stop), *box[1:])
        return self._stored.read(key, box)


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
    keys, alphas, added, notes = _keys(stored, shapes, start, file)
    sizes = by_module(keys, shapes)
    scales = {module: _scale(module, parts, settings, alphas, file) for module, parts in sizes.items()}
    own = {module: "lora_magnitude_vector" in parts for module, parts in sizes.items()}
    check_doras(settings, own, file)
    products = {}
    for module in [module for module, parts in sizes.items() if is_pair(parts)]:
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
    kind = kind_of(shapes) or ""
    blocks = blocks_in(shapes) if kind == "lokr" else None
    return AdapterScale(rank, alpha, dora, bool(settings.get("use_rslora")), kind, blocks)


def start_of_keys(names: Iterable[str]) -> str:
    """What a program puts before the model's names in all keys of a file."""
    known = [*names]
    return next(p for p in _PREFIXES if all(name.startswith((p, TEXT_ENCODER)) for name in known))


def _keys(
    stored: StoredTensors, shapes: Mapping[str, Shape], start: str, file: Path
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
        bare = plain_name(name).removeprefix(start)
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
    modules = by_module(keys, shapes)
    strange += [f"{start}{module}.alpha" for module in alphas if module not in modules]
    strange += [n for (m, _), n in keys.items() if len(shapes[n]) > 2 and not is_pair(modules[m])]
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


def is_adapter(path: Path) -> bool:
    """Whether a path is an adapter file (LoRA) or a folder with one, by file names only."""
    return any((path / name).is_file() or path.name == name for name in (PEFT_ADAPTER, DIFFUSERS_ADAPTER))


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
