"""Exports of a run's adapters as LoRA files for ComfyUI, kohya's scripts, Diffusers and PEFT.

Each file is loaded again before it gets its name, and compared with the checkpoint.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath

import torch
from torch import Tensor, nn

from mm_core import __version__
from mm_core.checkpoint.reading import StoredRun, Weights, stored_run
from mm_core.contracts import TaskModule
from mm_core.errors import MMError, plural
from mm_core.files import check_unused, staged_folder, write_durably
from mm_core.interchange.export import MAX_SHARD, planned, write_part
from mm_core.interchange.export_card import HUB, card_of
from mm_core.interchange.export_plan import Part, Planner
from mm_core.loading.provenance import given_weights, own_weights
from mm_core.modules.adapter_layers import PARTS, adapter_of
from mm_core.plan import build_task
from mm_core.weights.adapters.files import AdapterFile, AdapterScale, open_adapter
from mm_core.weights.adapters.inject import linear_layers, scales_of
from mm_core.weights.adapters.kinds import factor_of
from mm_core.weights.adapters.layouts import LAYOUTS, PUBLISHERS, LoraFormat
from mm_core.weights.adapters.locate import modules_in
from mm_core.weights.fitting import formats_of
from mm_core.weights.formats.format import AdapterLayout, divided, of_component
from mm_core.weights.writing import parse_size

_SHOWN = 5
_SEVERAL = "Dynamic"
# musubi-tuner 30c658c: its networks are made for the modules in a model's blocks (networks/lora_wan.py), but
# generation merges the tensors of all linear layers (utils/lora_utils.py), as ComfyUI does (comfy/lora.py).
_SKIPS = (
    "musubi-tuner's training skips these (--network_weights, --base_weights); its generation and ComfyUI"
    " apply them"
)


def export_lora(
    run: str | Path,
    out: str | Path,
    layout: str,
    *,
    weights: Weights = "model",
    dtype: str | None = None,
    component: str | None = None,
    trigger_words: Sequence[str] = (),
    overrides: Sequence[str] = (),
    note: Callable[[str], None] = lambda sentence: None,
    allow_code: bool = False,
    published: str | None = None,
) -> list[Path]:
    """Exports a run's adapters as LoRA files, which appear when they are complete and checked.

    Args:
        run: as for `export`.
        out: a new `.safetensors` file; with several experts or adapters, their names are added to the file's.
            For `lora/peft` a new folder.
        layout: `lora/comfyui`, `lora/kohya`, `lora/diffusers` or `lora/peft`.
        weights, dtype, component, overrides, allow_code: as for `export`.
        trigger_words: words of the training's captions that call for the style, for the file's header.
        note: called with a message about modules that the training left at zero.
        published: `org/name`, where the files will be on the hub; then a model card is written too, beside
            files as `<out>.md`.

    Returns:
        The files.

    Raises:
        MMError: no such checkpoint; a run without adapters; adapters that the layout cannot store; `out`
            exists; a file that differs from the checkpoint when it is loaded again.
    """
    out = _checked(Path(out), layout)
    stored = stored_run(run, overrides=overrides, allow_code=allow_code, fetch="configs")
    task = build_task(stored.config, stored.checkpoint.adapters)
    texts = {root: _texts(stored, task, root, trigger_words) for root in task.trainable}
    chosen = component or next((r for r in task.trainable if scales_of(task.get_submodule(r))), "")
    form = LoraFormat(layout, formats_of(stored.config.registry), out.name, texts.get(chosen, {}))
    plan = planned(stored, task, layout, form, weights, dtype, parse_size(MAX_SHARD), component, False)
    if not plan.adapters_alone:
        raise MMError(
            "this run trains no adapters, so there is no LoRA to export",
            where=f"--to {layout}",
            hint="export the full weights: --to diffusers, or your model's format",
        )
    saved = plan.planner.saved
    saved.ranks.agree(f"reading {saved.folder}", saved.verify)

    def fill(stage: Path) -> None:
        for part in plan.parts:
            for sentence in _write(stage, part, plan.planner, task.get_submodule(part.root)):
                note(sentence)

    files = _in_folder(out, fill) if layout == "lora/peft" else _moved(out, fill)
    if published:
        files.append(out / "README.md" if out.is_dir() else out.with_suffix(".md"))
        write_durably(files[-1], card_of(plan, out.name, published))
    return files


def _in_folder(out: Path, fill: Callable[[Path], None]) -> list[Path]:
    with staged_folder(out) as stage:
        fill(stage)
    return sorted(path for path in out.rglob("*") if path.is_file())


def _write(stage: Path, part: Part, planner: Planner, component: nn.Module) -> Iterator[str]:
    """Writes and checks the file of one adapter; yields sentences on what it leaves out for some."""
    ((adapter, scales),) = part.adapters.items()
    metadata = {**part.layout.metadata, **network_texts(scales.values())}
    write_part(stage, replace(part, layout=replace(part.layout, metadata=metadata)))
    yield from check_written(stage, part, planner, component)
    if planner.label in PUBLISHERS and (outside := outside_blocks(component, scales)):
        yield (
            f"{plural(len(outside), 'module')} of {adapter!r} outside the model's blocks"
            f" ({', '.join(outside[:_SHOWN])}): {_SKIPS}"
        )


def _checked(out: Path, layout: str) -> Path:
    if layout not in LAYOUTS:
        raise MMError(
            f"no layout of LoRA files is called {layout!r}", where="--to", accepted=", ".join(LAYOUTS)
        )
    folder, named = layout == "lora/peft", out.suffix == ".safetensors"
    if folder == named:
        raise MMError(
            f"{layout} is {'a folder with two files' if folder else 'one file for each expert'}",
            where=f"--out: {out}",
            accepted="the name of a new folder" if folder else "a name that ends in .safetensors",
        )
    check_unused(out)
    return out


def _moved(out: Path, fill: Callable[[Path], None]) -> list[Path]:
    """Fills a temporary folder beside `out` with files, and moves them to their places."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.tmp-") as folder:
            fill(Path(folder))
            made = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            places = [
                out.with_name("_".join((*path.relative_to(folder).parts[:-1], path.name))) for path in made
            ]
            for place in places:
                check_unused(place)
            for path, place in zip(made, places, strict=True):
                path.rename(place)
        return places
    except OSError as fault:
        raise MMError(f"this file could not be written: {fault.strerror or fault}", where=str(out)) from None


def _texts(stored: StoredRun, task: TaskModule, root: str, trigger_words: Sequence[str]) -> dict[str, str]:
    """Header texts by the names that programs for LoRAs read: base model, trigger words."""
    given = given_weights(stored.config.init_from, stored.checkpoint.facts)
    origin = given or own_weights(task.get_submodule(root)) or ""
    hub = HUB.search(origin)
    return {
        "modelspec.title": stored.config.run.name,
        "modelspec.trigger_phrase": ", ".join(trigger_words),
        "ss_base_model_version": f"{hub[1]}/{hub[2]}" if hub else PurePath(origin).name,
        "mm_core.version": __version__,
    }


def network_texts(scales: Iterable[AdapterScale]) -> dict[str, str]:
    """Header texts on the adapter of one file, as kohya's scripts and LyCORIS write them.

    `alpha / dim` is the factor of each module; where modules differ, kohya's scripts write "Dynamic"
    (networks/resize_lora.py). LoKr, LoHa and DoRA are networks of LyCORIS there.
    """
    held = [*scales]
    ranks = {str(scale.rank) for scale in held}
    alphas = {f"{scale.factor * scale.rank:.9g}" for scale in held}
    kind, args = held[0].kind, {"algo": held[0].kind}
    if kind == "lokr":
        with suppress(ValueError):
            if (factor := factor_of(scale.blocks for scale in held if scale.blocks)) is not None:
                args["factor"] = str(factor)
    if held[0].dora:
        args["dora_wd"] = "True"
    own = {"ss_network_module": "networks.lora"}
    if kind != "lora" or held[0].dora:
        own = {"ss_network_module": "lycoris.kohya", "ss_network_args": json.dumps(args)}
    return {
        **own,
        "ss_network_dim": ranks.pop() if len(ranks) == 1 else _SEVERAL,
        "ss_network_alpha": alphas.pop() if len(alphas) == 1 else _SEVERAL,
    }


def outside_blocks(component: nn.Module, names: Iterable[str]) -> list[str]:
    """The modules with these names that are in no list of modules of a component, such as its blocks."""
    lists = (path for path, module in component.named_modules() if isinstance(module, nn.ModuleList))
    starts = tuple(f"{path}." for path in lists)
    return [name for name in names if not name.startswith(starts)]


def check_written(stage: Path, part: Part, planner: Planner, module: nn.Module) -> list[str]:
    """Loads a written LoRA file and compares it with the checkpoint, bit for bit.

    Args:
        stage: folder of the files.
        part: what was written.
        planner: reads the checkpoint, and knows the layout.
        module: the component, with its adapters.

    Returns:
        Sentences on modules whose second matrix is zero in the checkpoint.

    Raises:
        MMError: a module is missing in the file, or differs from the checkpoint.
    """
    file = stage / part.layout.folder / f"{part.layout.stem}.safetensors"
    layouts = of_component(planner.form.adapter(part.root, module))
    ((adapter, scales),) = part.adapters.items()
    (layout,) = (one for one, names in zip(layouts, divided(layouts, scales), strict=True) if names)
    faults: list[str] = []
    zero: list[str] = []
    for name, differs in _differences(file, layout, part, adapter, planner, module):
        (zero if differs is None else faults).append(f"{name}{'' if differs is None else f' ({differs})'}")
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise MMError(
            f"the written LoRA differs from the checkpoint in {plural(len(faults), 'module')}:"
            f" {', '.join(faults[:_SHOWN])}{more}",
            where=part.layout.stem,
            hint="nothing was exported; check the disk, and report this if it happens again",
        )
    shown = ", ".join(zero[:_SHOWN])
    return (
        [f"{plural(len(zero), 'module')} of {adapter!r} changed nothing in training: {shown}"] if zero else []
    )


def _differences(
    file: Path, layout: AdapterLayout, part: Part, adapter: str, planner: Planner, module: nn.Module
) -> Iterator[tuple[str, str | None]]:
    """(module, what differs) for each module in the file that differs; None for a second matrix of zeros."""
    placed = part.layout.keys.placed.items()
    beside = {name: copies[0].stored for name, copies in placed if adapter_of(name) is None}
    held = open_adapter(file, beside.values())
    for name, key in beside.items():
        if not _holds(held, key, planner.read(f"{part.root}.{name}")):
            yield name, "values"
    for key, name in part.computed.items():
        if not _holds(held, key, part.produce(key)):
            yield name, f"values of {key.rpartition('.')[2]}"
    found = modules_in(layout, linear_layers(module), module, held)
    for name, scale in part.adapters[adapter].items():
        if name not in found:
            yield name, "missing"
            continue
        stored = found[name][1]
        if stored not in held.scales:  # part of a joined module, which is compared above
            continue
        if not math.isclose(held.scales[stored].factor, scale.factor, rel_tol=1e-6):
            yield name, f"scale {held.scales[stored].factor:g} instead of {scale.factor:g}"
            continue
        trained = {
            p: t
            for p in PARTS
            if not (layout.additions and p == "lora_magnitude_vector")  # its dora_scale is compared above
            and (t := planner.adapter(f"{part.root}.{name}", p, adapter)) is not None
        }
        for piece, expected in trained.items():
            if not _holds(held, held.keys.get((stored, piece), ""), expected):
                yield name, f"values of {piece}"
                break
        else:
            if not all(tensor.any() for tensor in trained.values()):
                yield name, None


def _holds(file: AdapterFile, key: str, expected: Tensor | None) -> bool:
    """Whether a file has a tensor with this stored name and exactly these values."""
    shape = file.stored.shapes.get(key)
    if shape is None or expected is None or tuple(shape) != tuple(expected.shape):
        return False
    return torch.equal(file.stored.read(key, tuple(slice(None) for _ in shape)), expected)
