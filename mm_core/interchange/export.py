"""Exporting a checkpoint's weights to files that the models' own libraries load: `mm export`.

It takes one process and builds no model: the task is built on the meta device for its names and shapes, and
each stored tensor is read from the checkpoint, arranged, cast and written before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mm_core.checkpoint.reading import StoredRun, Weights, stored_run
from mm_core.contracts import TaskModule, torch_dtype
from mm_core.errors import ContractError, MMError, did_you_mean
from mm_core.fetching import fetch
from mm_core.files import check_unused, staged_folder, write_durably
from mm_core.hub import HubName
from mm_core.hub_files import Use
from mm_core.interchange.copied_files import check_taken, copy_verbatim
from mm_core.interchange.export_base import any_dora, begun_in, changed_in, check_base_in_files
from mm_core.interchange.export_card import card_of
from mm_core.interchange.export_plan import ExportPlan, Part, Planner, own_state
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.loading.left_out import ExternalWeights, WeightSources, frozen_names
from mm_core.loading.provenance import given_weights, sources_of
from mm_core.modules.adapter_layers import adapted_layers
from mm_core.modules.quantised import quantised_layers
from mm_core.plan import build_task
from mm_core.runtime.ranks import Ranks
from mm_core.weights.fitting import formats_of
from mm_core.weights.formats.format import Companions, WeightFormat, Written
from mm_core.weights.progress import byte_bar
from mm_core.weights.writing import parse_size, write_nested, write_shards

MAX_SHARD = "5GB"
"""Default for the largest file, as model hubs recommend."""


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
    published: str | None = None,
) -> Path:
    """Exports a checkpoint's trained components in a weight format; `out` appears when it is complete.

    For a run with adapters, only the adapters are written.

    Args:
        run: a run's folder (its newest checkpoint), `DIR@STEP`, `DIR@best`, or a checkpoint's folder.
        out: a folder that does not exist yet, or is empty.
        format: name of a weight format.
        weights: `ema` exports the average, and the model's tensors without one; `auto` where there is one.
        merge_adapters: write the weights with the adapters merged into them (computed in fp32) instead.
        dtype: `bf16`, `fp16` or `fp32`, for all floating-point parameters; None keeps the checkpoint's, and
            at least fp32 for merged weights.
        max_shard: size of the largest file, as `5GB`.
        component: the only component to export, if the task trains several.
        pipeline: pipeline's folder to copy the remaining parts from; None: the one the run started from.
        overrides: `key.path=value` over the run's config, for folders that have moved.
        note: called with a message about folders that the run started from and that no longer exist.
        allow_code: run code that the run's config names even if this user has not trained with it.
        published: `org/name`, where the export will be on the hub; its model card gives this place.

    Returns:
        The path `out`.

    Raises:
        MMError: no such checkpoint, or a damaged one; a component that the format cannot store; `out` exists
            and is not empty; a full disk.
    """
    out = Path(out)
    check_unused(out)
    limit = parse_size(max_shard)
    stored = stored_run(run, overrides=overrides, allow_code=allow_code, fetch="configs")
    task = build_task(stored.config, stored.checkpoint.adapters)
    (label, form), *_ = formats_of(stored.config.registry, format).items()
    plan = planned(stored, task, label, form, weights, dtype, limit, component, merge_adapters)
    plan = _placed(plan, pipeline, note)
    _check_apart(plan.parts)
    named = [(path, name) for path in plan.companions.copies.values() if (name := HubName.at(Path(path)))]
    fetch([Use(name, weights=(path / "config.json").is_file()) for path, name in named])
    for taken in plan.companions.copies.values():
        check_taken(taken)
    saved = plan.planner.saved
    saved.ranks.agree(f"reading {saved.folder}", saved.verify)
    _write(out, plan, published)
    return out


def planned(
    run: StoredRun,
    task: TaskModule,
    label: str,
    form: WeightFormat,
    weights: Weights,
    dtype: str | None,
    limit: int,
    component: str | None,
    merge: bool,
) -> ExportPlan:
    """The parts and files of the trained components, or of the chosen one; reads names and shapes only. See
    `export` and `Planner` for the arguments."""
    averaged = weights == "ema" or (weights == "auto" and "ema" in run.checkpoint.parts)
    tables = {name for name, _ in task.named_buffers()}
    layers = quantised_layers({root: task.get_submodule(root) for root in task.trainable})
    which: Literal["model", "ema"] = "ema" if averaged else "model"
    saved = Ranks.current().agree(
        f"reading {run.checkpoint.folder}",
        lambda: CheckpointSource(run.checkpoint, which, otherwise="leave out --ema"),
    )
    planner = Planner(
        run.config.registry,
        label,
        form,
        saved,
        torch_dtype(dtype) if dtype else None,
        limit,
        tables,
        {name: layer.kind for name, layer in layers.items()},
        averaged,
    )
    modules = {root: task.get_submodule(root) for root in _roots(task, component)}
    adapted = {root: module for root, module in modules.items() if adapted_layers(module)}
    alone = bool(adapted) and not merge
    more = alone and any(layout.additions for r, m in adapted.items() for layout in planner.layouts(r, m))
    changed = changed_in(run, task, adapted) if more else {}
    of_base = more and (any_dora(adapted) or any(changed.values()))
    sources = WeightSources(task, run.config.init_from, run.config.registry, run.config.allow_code)
    base = _complete(planner.saved, sources, alone=alone and not of_base)
    if merge and not adapted:
        raise MMError(
            "this run trains no adapters, so there is nothing to merge",
            where="--merge-lora",
            hint="leave out --merge-lora",
        )
    if alone:
        if not more:
            check_base_in_files(run, task)
        elif any(changed.values()):
            planner = replace(planner, begun=begun_in(sources, planner.saved, base, changed))
        for root in [root for root in modules if root not in adapted]:
            planner.check_nothing_beside(root, modules[root])
        parts = [p for root, m in adapted.items() for p in planner.adapters(root, m, changed.get(root, ()))]
    else:
        parts = [part for root, module in modules.items() for part in planner.weights(root, module)]
    whole = not alone and len(modules) == len(task.trainable)
    return ExportPlan(planner, run.config, task, parts, alone, whole)


def _placed(plan: ExportPlan, pipeline: str | Path | None, note: Callable[[str], None]) -> ExportPlan:
    """The plan with each part at its place in a complete pipeline, for formats that write one.

    Args:
        plan: the plan without places.
        pipeline: pipeline to copy from; None for the one that the weights started from.
        note: called with a message about folders that no longer exist.
    """
    companions = Companions()
    if plan.whole:
        given = given_weights(plan.config.init_from, plan.planner.saved.checkpoint.facts)
        sources = sources_of(given, plan.task, plan.config.allow_code, note)
        chosen = None if pipeline is None else (Path(pipeline),)
        laid = [(part.root, part.layout) for part in plan.parts]
        written = [
            Written(root, layout.part, layout.folder, layout.texts, chosen or sources[root])
            for root, layout in laid
        ]
        companions = plan.planner.form.companions(plan.task, written)
        gone = {path for paths in sources.values() for path in paths if not path.exists()}
        # Weights that no library loads are not a pipeline.
        if gone and not companions.copies and plan.parts[0].layout.library:
            places = ", ".join(sorted(map(str, gone)))
            note(f"{places}: the run started from this, but it is gone; only trained weights are written")
    if pipeline is not None and not companions.places:
        raise _no_pipeline(Path(pipeline), plan.planner.label, plan.whole)
    parts = []
    for part in plan.parts:
        folder = companions.places.get((part.root, part.layout.part), part.layout.folder)
        parts.append(replace(part, layout=replace(part.layout, folder=folder)))
    return replace(plan, parts=parts, companions=companions)


def _write(out: Path, plan: ExportPlan, published: str | None) -> None:
    size = sum(part.nbytes for part in plan.parts)
    with staged_folder(out) as stage, byte_bar(f"writing {out}", size) as advance:
        for part in plan.parts:
            write_part(stage, part, advance)
        for name, text in plan.companions.texts.items():
            write_durably(_inside(stage, name), text)
        for name, origin in plan.companions.copies.items():
            copy_verbatim(Path(origin), _inside(stage, name))
        write_durably(_inside(stage, "README.md"), card_of(plan, out.name, published))


def write_part(stage: Path, part: Part, advance: Callable[[int], None] = lambda size: None) -> None:
    """Writes the weights files and texts of one exported part.

    Args:
        stage: folder of the export.
        part: what to write.
        advance: called with the bytes after each tensor.

    Raises:
        ContractError: the part's layout names a place outside of the folder.
    """
    layout, folder = part.layout, _inside(stage, part.layout.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if layout.nested:
        write_nested(folder / f"{layout.stem}.pt", layout.nested, part.tensors, part.produce, advance)
    else:
        write_shards(folder, part.shards, part.produce, layout.stem, layout.metadata, advance)
    for name, text in layout.texts.items():
        write_durably(_inside(folder, name), text)


def _complete(saved: CheckpointSource, sources: WeightSources, *, alone: bool) -> ExternalWeights:
    """Compares the checkpoint with the task by names and shapes, and finds frozen weights that it lacks.

    For adapters alone, the frozen weights are not needed.
    """
    base, task = ExternalWeights(), sources.task
    state = {
        f"{root}.{name}": tensor
        for root in task.trainable
        for name, tensor in own_state(task.get_submodule(root)).items()
    }
    if alone:
        missing = frozen_names(task) - saved.shapes.keys()
        state = {name: tensor for name, tensor in state.items() if name not in missing}
    else:
        base = sources.recorded(saved.checkpoint, state)
        saved.join(base, state)
    saved.ranks.agree(f"reading {saved.folder}", lambda: saved.check_fits(state))
    return base


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


def _no_pipeline(folder: Path, label: str, whole: bool) -> MMError:
    if not whole:
        return MMError(
            "--pipeline needs an export of all weights that the run trains, but this one exports only a part",
            where="--pipeline",
            hint="leave out --component, or merge the adapters: --merge-lora",
        )
    return MMError(
        f"this pipeline has no component for the weights that the run trained (format {label})",
        where=f"--pipeline: {folder}",
        accepted="a folder whose model_index.json lists a model of the exported class",
        hint="pass the pipeline that the training started from",
    )


def _check_apart(parts: Sequence[Part]) -> None:
    """MMError if two components would be written to files of the same name."""
    places: dict[tuple[str, str], Part] = {}
    for part in parts:
        other = places.setdefault((part.layout.folder, part.layout.stem), part)
        if other is not part:
            raise MMError(
                f"{other.root!r} and {part.root!r} would be written to files of the same name",
                where="--to",
                hint=f"export them separately: --component {other.root}",
            )


def _inside(folder: Path, name: str) -> Path:
    """A place below `folder` that does not exist yet; a format that returns any other is wrong."""
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or path.is_file():
        raise ContractError(
            f"the weight format would write {name!r}, which is outside the exported folder or already in it",
            where="--to",
            hint="choose another weight format, or correct the file names that this one returns",
        )
    return path
