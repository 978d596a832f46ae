"""A checkpoint's weights as files that the models' own libraries load: `mm export`.

One process, and no model: the task is built on meta for its names and shapes, and each stored tensor is
read from the checkpoint, laid out, cast and written before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import Weights, stored_run
from mm_core.config.schema import RunConfig
from mm_core.contracts import TaskModule, torch_dtype
from mm_core.errors import ContractError, MMError, did_you_mean
from mm_core.files import check_unused, staged_folder, write_durably
from mm_core.interchange.copied_files import check_taken, take_over
from mm_core.interchange.export_card import card_of
from mm_core.interchange.export_plan import Part, Planner, own_state
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.loading.left_out import frozen_names, recorded
from mm_core.loading.provenance import origins_of
from mm_core.loading.run_adapters import task_of
from mm_core.modules.adapter_layers import adapted_layers
from mm_core.runtime.ranks import Ranks
from mm_core.weights.fitting import formats_of
from mm_core.weights.formats.format import Companions, WeightFormat, Written
from mm_core.weights.progress import byte_bar
from mm_core.weights.writing import parse_size, write_shards

MAX_SHARD = "5GB"
"""Most bytes of a file, as hubs like them."""


def export(
    run: str | Path,
    out: str | Path,
    format: str,
    *,
    weights: Weights = "model",
    merge_adapters: bool = False,
    dtype: str | None = None,
    max_shard: str | int = MAX_SHARD,
    component: str | None = None,
    pipeline: str | Path | None = None,
    overrides: Sequence[str] = (),
    note: Callable[[str], None] = lambda sentence: None,
    allow_code: bool = False,
) -> Path:
    """Writes a checkpoint's trained components in a weight format; `out` appears when all of it is there.
    Of a run that trains adapters it writes these alone.

    Args:
        run: a run's folder (its newest checkpoint), `DIR@STEP`, `DIR@best`, or a checkpoint's folder.
        out: a folder that does not exist yet, or is empty.
        format: name of a weight format.
        weights: `ema` takes the average of what was trained, and the model's own tensors for the rest;
            `auto` does so where the checkpoint holds an average.
        merge_adapters: write the weights with the adapters in them (computed in fp32) instead.
        dtype: `bf16`, `fp16`, `fp32`: of all floating-point parameters; buffers (tables, running means) and,
            with None, everything keep that of the checkpoint.
        max_shard: most bytes of a file, as `5GB`.
        component: of the task, where it trains several and only one is wanted.
        pipeline: folder whose other parts are taken over, for formats that write whole pipelines; None
            takes the one that the run began with.
        overrides: `key.path=value` over the run's config: where folders are that have moved.
        note: told of folders that the run began with and that are gone: nothing of them is taken over.
        allow_code: code that the run names runs, also where this user has not trained with it.

    Raises:
        MMError: no such checkpoint, or a damaged one; a format that can not hold a component; something at
            `out` already; a full disk.
    """
    out = Path(out)
    check_unused(out)
    limit = parse_size(max_shard)
    stored = stored_run(run, overrides=overrides, allow_code=allow_code)
    source, config = stored.checkpoint, stored.config
    averaged = weights == "ema" or (weights == "auto" and "ema" in source.parts)
    plan = _planned(source, config, format, averaged, merge_adapters, dtype, limit, component)
    plan = _placed(plan, pipeline, note)
    _check_apart(plan.parts)
    for taken in plan.companions.copies.values():
        check_taken(taken)
    Ranks.current().agree(f"reading {source.folder}", plan.saved.verify)
    _write_all(out, plan)
    return out


@dataclass(frozen=True)
class _Export:
    """What an export writes.

    Attributes:
        label, form: the format.
        saved: the checkpoint's tensors.
        whole: whether all that the run trains is written, with its weights.
        companions: what lies beside the parts.
    """

    source: OpenedCheckpoint
    config: RunConfig
    label: str
    form: WeightFormat
    task: TaskModule
    saved: CheckpointSource
    parts: list[Part]
    averaged: bool
    adapters_alone: bool
    whole: bool
    companions: Companions = field(default_factory=Companions)


def _planned(
    source: OpenedCheckpoint,
    config: RunConfig,
    format: str,
    averaged: bool,
    merge_adapters: bool,
    dtype: str | None,
    limit: int,
    component: str | None,
) -> _Export:
    """The parts and their files; nothing is read but names and shapes."""
    (label, form), *_ = formats_of(config.registry, format).items()
    task = task_of(config, source)
    which: Literal["model", "ema"] = "ema" if averaged else "model"
    saved = Ranks.current().agree(
        f"reading {source.folder}", lambda: CheckpointSource(source, which, otherwise="leave out --ema")
    )
    _complete(saved, config, task, alone=not merge_adapters and _adapted(task, component))
    tables = {name for name, _ in task.named_buffers()}
    lowered = torch_dtype(dtype) if dtype else None
    planner = Planner(config.registry, label, form, saved, lowered, limit, tables)
    parts = _parts(task, planner, component, merge_adapters)
    adapters_alone = any(part.adapters for part in parts) and not merge_adapters
    roots = {part.root for part in parts}
    whole = not adapters_alone and len(roots) == len(task.trainable)
    return _Export(source, config, label, form, task, saved, parts, averaged, adapters_alone, whole)


def _placed(plan: _Export, pipeline: str | Path | None, note: Callable[[str], None]) -> _Export:
    """The same with each part where a whole pipeline has it, for formats that write one."""
    companions, parts = Companions(), plan.parts
    if plan.whole:
        origins = origins_of(plan.config, plan.source.facts, plan.task, note)
        companions = plan.form.companions(plan.task, _written(parts, origins, pipeline))
        gone = {path for paths in origins.values() for path in paths if not path.exists()}
        if gone and not companions.copies and parts[0].library:  # what no library loads is no pipeline
            places = ", ".join(sorted(map(str, gone)))
            note(f"{places}: the run began with it, and it is gone: what was trained is written alone")
    if pipeline is not None and not companions.places:
        raise _no_pipeline(Path(pipeline), plan.label, plan.whole)
    parts = [replace(part, folder=companions.places.get(_key(part), part.folder)) for part in parts]
    return replace(plan, parts=parts, companions=companions)


def _write_all(out: Path, plan: _Export) -> None:
    size = sum(part.nbytes for part in plan.parts)
    with staged_folder(out) as stage, byte_bar(f"writing {out}", size) as advance:
        for part in plan.parts:
            _write(stage, part, advance)
        _accompany(stage, plan.companions)
        card = card_of(
            plan.source,
            plan.config,
            plan.label,
            plan.task,
            plan.parts,
            plan.averaged,
            plan.adapters_alone,
            out.name,
            plan.companions.loading,
        )
        write_durably(_inside(stage, "README.md"), card)


def _complete(saved: CheckpointSource, config: RunConfig, task: TaskModule, *, alone: bool) -> None:
    """Compares the checkpoint with the task by names and shapes, and finds what it leaves to other files,
    which adapters alone do not need."""
    state = {
        f"{root}.{name}": tensor
        for root in task.trainable
        for name, tensor in own_state(task.get_submodule(root)).items()
    }
    if alone:
        missing = frozen_names(task) - saved.shapes.keys()
        state = {name: tensor for name, tensor in state.items() if name not in missing}
    else:
        saved.join(recorded(saved.checkpoint, config, task, state), state)
    Ranks.current().agree(f"reading {saved.folder}", lambda: saved.compare(state))


def _adapted(task: TaskModule, component: str | None) -> bool:
    """Whether anything of what is exported has adapters."""
    return any(adapted_layers(task.get_submodule(root)) for root in _roots(task, component))


def _roots(task: TaskModule, component: str | None) -> tuple[str, ...]:
    names: tuple[str, ...] = tuple(task.trainable)
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


def _parts(task: TaskModule, planner: Planner, component: str | None, merge: bool) -> list[Part]:
    """All that is written, of the components that the run trains or of the one that is asked for."""
    modules = {root: task.get_submodule(root) for root in _roots(task, component)}
    adapted = {root: module for root, module in modules.items() if adapted_layers(module)}
    if merge and not adapted:
        raise MMError("this run trains no adapter that could be merged", where="--merge-lora")
    if adapted and not merge:
        for root in modules.keys() - adapted.keys():
            planner.check_nothing_beside(root, modules[root])
        return [part for root, module in adapted.items() for part in planner.adapters(root, module)]
    return [part for root, module in modules.items() for part in planner.weights(root, module)]


def _key(part: Part) -> tuple[str, str]:
    return part.root, part.part


def _written(
    parts: Sequence[Part], origins: Mapping[str, Sequence[Path]], pipeline: str | Path | None
) -> list[Written]:
    """What formats are told of the parts. pipeline: is taken for where all of them began."""
    chosen = None if pipeline is None else (Path(pipeline),)
    return [
        Written(part.root, part.part, part.folder, part.texts, chosen or origins[part.root]) for part in parts
    ]


def _no_pipeline(folder: Path, label: str, whole: bool) -> MMError:
    if not whole:
        return MMError(
            "a pipeline is written with all that the run trains, and here a part of it is exported",
            where="--pipeline",
            hint="leave out --component, or merge the adapters: --merge-lora",
        )
    return MMError(
        f"the format {label} finds no part in this pipeline that the exported weights could be",
        where=f"--pipeline: {folder}",
        accepted="a folder whose model_index.json lists a model of the class that is written",
    )


def _check_apart(parts: Sequence[Part]) -> None:
    """MMError where two components would have files of the same name."""
    places: dict[tuple[str, str], Part] = {}
    for part in parts:
        other = places.setdefault((part.folder, part.stem), part)
        if other is not part:
            raise MMError(
                f"{other.root!r} and {part.root!r} would be files of the same name",
                where="--to",
                hint=f"export one after another: --component {other.root}",
            )


def _write(stage: Path, part: Part, advance: Callable[[int], None]) -> None:
    """The files of one part."""
    folder = _inside(stage, part.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, part.shards, part.produce, stem=part.stem, metadata=part.metadata, advance=advance)
    for name, text in part.texts.items():
        write_durably(_inside(folder, name), text)


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
