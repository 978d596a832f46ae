"""A checkpoint's weights as files that the models' own libraries load: `mm export`.

One process, and no model: the task is built on meta for its names and shapes, and each stored tensor is
read from the checkpoint, laid out, cast and written before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from mm_core.config.load import load_config
from mm_core.contracts import torch_dtype
from mm_core.errors import CheckpointError, ContractError, MMError, did_you_mean
from mm_core.parallel.tying import tied_names
from mm_core.plan import build_task
from mm_core.plugin.registry import Registry, get_registry
from mm_core.train.agreement import Ranks
from mm_core.train.checkpoint_dcp import stored_parts
from mm_core.train.checkpoint_io import write_durably
from mm_core.train.checkpoint_reading import find_checkpoint
from mm_core.train.checkpoint_retention import complete_steps
from mm_core.train.export_card import card_of
from mm_core.train.staging import check_unused, staged_folder
from mm_core.train.taking_over import take_over
from mm_core.train.weight_sources import RunSource
from mm_core.weights.fitting import formats_of
from mm_core.weights.format import Companions, Layout, WeightFormat
from mm_core.weights.key_map import Copy
from mm_core.weights.progress import byte_bar
from mm_core.weights.writing import Shard, TensorSpec, assemble, parse_size, plan_shards, write_shards

Weights = Literal["model", "ema", "auto"]

MAX_SHARD = "5GB"
"""Most bytes of a file, as hubs like them."""

_CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Part:
    """One component on its way out. copies: by stored name. dtypes: of the component's tensors as they will
    be written."""

    root: str
    layout: Layout
    copies: Mapping[str, Sequence[Copy]]
    dtypes: Mapping[str, torch.dtype]
    shards: Sequence[Shard]

    @property
    def nbytes(self) -> int:
        """Of all its files, without their headers."""
        return sum(spec.nbytes for shard in self.shards for spec in shard.tensors)


def export(
    run: str | Path,
    out: str | Path,
    format: str,
    *,
    weights: Weights = "model",
    dtype: str | None = None,
    max_shard: str | int = MAX_SHARD,
    component: str | None = None,
) -> Path:
    """Writes a checkpoint's trained components in a weight format; `out` appears when all of it is there.

    Args:
        run: a run's folder (its newest checkpoint), `DIR@STEP`, `DIR@best`, or a checkpoint's folder.
        out: a folder that does not exist yet, or is empty.
        format: name of a weight format.
        weights: `ema` takes the average of what was trained, and the model's own tensors for the rest;
            `auto` does so where the checkpoint holds an average.
        dtype: `bf16`, `fp16`, `fp32`: of all floating-point tensors; None keeps that of the checkpoint.
        max_shard: most bytes of a file, as `5GB`.
        component: of the task, where it trains several and only one is wanted.

    Raises:
        MMError: no such checkpoint, or a damaged one; a format that can not hold a component; something at
            `out` already; a full disk.
    """
    out, source = Path(out), checkpoint_at(run)
    check_unused(out)
    limit = parse_size(max_shard)
    config = load_config(source / "config.yaml")
    registry = get_registry(config.plugins.path)
    form = formats_of(registry, format)
    (label, chosen), *_ = form.items()
    task = build_task(config)
    averaged = weights == "ema" or (weights == "auto" and "ema" in stored_parts(source))
    ranks = Ranks.current()
    doing = f"reading {source}"
    saved = ranks.agree(doing, lambda: _open(source, averaged, task))
    parts = [
        _part(registry, label, chosen, task, root, saved, torch_dtype(dtype) if dtype else None, limit)
        for root in _roots(task, component)
    ]
    _check_apart(parts)
    ranks.agree(doing, saved.verify)
    whole = len(parts) == len(task.trainable)  # type: ignore[arg-type]
    with (
        staged_folder(out) as stage,
        byte_bar(f"writing {out}", sum(part.nbytes for part in parts)) as advance,
    ):
        for part in parts:
            _write(stage, part, saved, doing, advance)
        _accompany(stage, chosen.companions(task) if whole else Companions())
        written = {
            part.root: (task.get_submodule(part.root), part.layout, tuple(part.dtypes.values()))
            for part in parts
        }
        taken = "the moving average" if averaged else "as trained"
        card = card_of(source, config, registry, label, written, taken, out.name)
        write_durably(_inside(stage, "README.md"), card)
    return out


def checkpoint_at(run: str | Path) -> Path:
    """The checkpoint that `DIR`, `DIR@STEP`, `DIR@best` or a checkpoint's own folder stands for."""
    folder, mark, step = str(run).rpartition("@")
    if not mark or Path(run).exists():
        return find_checkpoint(Path(run))
    place = Path(folder)
    if step in ("best", "latest"):
        return find_checkpoint(place, step)  # type: ignore[arg-type]  # mypy does not narrow by `in`
    steps = complete_steps(place / "checkpoints" if (place / "checkpoints").is_dir() else place)
    if step.isdecimal() and int(step) in steps:
        return steps[int(step)]
    known = ", ".join(map(str, sorted(steps))) or "none: the folder has no complete checkpoint"
    raise CheckpointError(
        f"there is no complete checkpoint {step!r} of this run",
        where=folder,
        accepted=f"{known}, best, latest",
    )


def _open(source: Path, averaged: bool, task: nn.Module) -> RunSource:
    """The checkpoint, compared with the task by names and shapes."""
    saved = RunSource(source, "ema" if averaged else "model", otherwise="leave out --ema")
    saved.compare(
        {
            f"{root}.{name}": tensor
            for root in task.trainable  # type: ignore[union-attr]
            for name, tensor in own_state(task.get_submodule(root)).items()
        }
    )
    return saved


def own_state(component: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; one that several names share, by the first, as its library saves it."""
    tied = tied_names(component)
    return {name: tensor for name, tensor in component.state_dict().items() if name not in tied}


def _roots(task: nn.Module, component: str | None) -> tuple[str, ...]:
    names: tuple[str, ...] = tuple(task.trainable)  # type: ignore[arg-type]
    if component is None:
        return names
    if component not in names:
        raise MMError(
            f"this run trains no component {component!r}",
            where="--component",
            accepted=", ".join(names),
            hint=did_you_mean(component, names),
        )
    return (component,)


def _part(
    registry: Registry,
    label: str,
    form: WeightFormat,
    task: nn.Module,
    root: str,
    saved: RunSource,
    dtype: torch.dtype | None,
    limit: int,
) -> Part:
    """Where everything of a component goes. MMError for a format that can not hold it."""
    module = task.get_submodule(root)
    layout = form.layout(root, module)
    if layout is None:
        raise _cannot_hold(registry, label, root, module)
    own = own_state(module)
    dtypes = {name: saved.dtypes[f"{root}.{name}"] for name in own}
    if dtype is not None:
        dtypes = {name: dtype if kind in _CASTABLE else kind for name, kind in dtypes.items()}
    copies: dict[str, list[Copy]] = {}
    for copy in layout.keys.copies({name: tuple(tensor.shape) for name, tensor in own.items()}):
        copies.setdefault(copy.stored, []).append(copy)
    # What is stored as one has one dtype: the widest of its parts.
    for held in copies.values():
        widest = reduce(torch.promote_types, (dtypes[copy.component] for copy in held))
        dtypes |= {copy.component: widest for copy in held}
    specs = [TensorSpec(n, dtypes[held[0].component], held[0].stored_shape) for n, held in copies.items()]
    return Part(root, layout, copies, dtypes, plan_shards(specs, layout.stem, limit))


def _cannot_hold(registry: Registry, label: str, root: str, module: nn.Module) -> MMError:
    able = [name for name, form in formats_of(registry).items() if form.layout(root, module) is not None]
    return MMError(
        f"the format {label} can not hold {root!r}, a {type(module).__name__}",
        where="--to",
        accepted=", ".join(sorted(able)) or "no installed format can: a plugin offers one by mm_weight_formats",
    )


def _check_apart(parts: Sequence[Part]) -> None:
    """MMError where two components would have files of the same name."""
    places: dict[tuple[str, str], str] = {}
    for part in parts:
        place = (part.layout.folder, part.layout.stem)
        if (other := places.setdefault(place, part.root)) != part.root:
            raise MMError(
                f"{other!r} and {part.root!r} would be files of the same name",
                where="--to",
                hint=f"export one after another: --component {other}",
            )


def _write(stage: Path, part: Part, saved: RunSource, doing: str, advance: Callable[[int], None]) -> None:
    """The files of one component."""
    folder = _inside(stage, part.layout.folder)
    folder.mkdir(parents=True, exist_ok=True)
    held: tuple[str, Tensor] | None = None

    def read(name: str) -> Tensor:
        """Keeps the last one: what is stored in several pieces is read once."""
        nonlocal held
        if held is None or held[0] != name:
            held = None  # freed before the next is allocated
            path = f"{part.root}.{name}"
            target = torch.empty(saved.shapes[path], dtype=part.dtypes[name])
            Ranks.current().agree(doing, lambda: saved.fill({path: target}))
            _check_range(path, target)
            held = (name, target)
        return held[1]

    write_shards(
        folder,
        part.shards,
        lambda stored: assemble(part.copies[stored], read),
        stem=part.layout.stem,
        metadata=part.layout.metadata,
        advance=advance,
    )
    for name, text in part.layout.texts.items():
        write_durably(_inside(folder, name), text)


def _check_range(path: str, tensor: Tensor) -> None:
    if tensor.dtype == torch.float16 and not bool(torch.isfinite(tensor).all()):
        raise MMError(
            f"{path} holds values that fp16 has no numbers for", where="--dtype", accepted="bf16, fp32"
        )


def _accompany(stage: Path, companions: Companions) -> None:
    """Texts and files at the top."""
    for name, text in companions.texts.items():
        write_durably(_inside(stage, name), text)
    for name, origin in companions.copies.items():
        take_over(Path(origin), _inside(stage, name))


def _inside(folder: Path, name: str) -> Path:
    """A place below `folder`, not taken yet; a format that names another one is wrong."""
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or path.is_file():
        raise ContractError(f"a weight format would write {name!r}, which is outside or there already")
    return path
