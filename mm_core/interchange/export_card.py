"""The content of an export's model card, gathered from the checkpoint, its manifest and its config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath

import torch

from mm_core import __version__
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.config.components import walk_components
from mm_core.config.dump import to_mapping
from mm_core.errors import plural
from mm_core.hub import PREFIX
from mm_core.interchange.export_plan import ExportPlan
from mm_core.interchange.model_card import Card, render
from mm_core.loading.provenance import given_weights, own_weights
from mm_core.plugin.records import Registered

_SECTIONS = ("task", "train", "optimizer", "lr_schedule", "ema", "engine", "init_from")
HUB = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def card_of(plan: ExportPlan, folder: str, published: str | None = None) -> str:
    """The text of an export's model card, README.md.

    Args:
        plan: what is exported.
        folder: the export's name.
        published: its repository on the hub.
    """
    config, source = plan.config, plan.planner.saved.checkpoint
    facts, manifest = source.facts, source.manifest
    step = facts["step"]
    roots = list(dict.fromkeys(part.root for part in plan.parts))
    known, registry = dict(walk_components(config.task)), config.registry
    built = {r: registry.resolve(known[r].kind, known[r].type) if r in known else None for r in roots}
    named = [own_weights(plan.task.get_submodule(root)) for root in roots]
    origins = [path for path in (*named, given_weights(config.init_from, facts)) if path is not None]
    hubs = [f"{found[1]}/{found[2]}" for origin in origins if (found := HUB.search(origin))]
    names = ("adapters of " if plan.adapters_alone else "") + ", ".join(f"`{root}`" for root in roots)
    form = f"the format `{plan.planner.label}`"
    after = f"{names} of the run `{config.run.name}` after {plural(step, 'step')}, in {form}."
    place = f"{PREFIX}{published}" if published else folder
    begins = f" In mm_core, `init_from: {{path: {place}}}` starts a run from it."
    folder = published or folder
    layouts = [part.layout for part in plan.parts]
    separate = [one.loading.replace("{folder}", str(PurePath(folder, one.folder))) for one in layouts]
    card = Card(
        title=f"{config.run.name}, step {step}",
        summary=after + ("" if plan.adapters_alone else begins),
        library=next((one.library for one in layouts if one.library), "mm_core"),
        licence=_licence(built.values()),
        base_model=hubs[0] if hubs else None,
        tags=["mm_core", config.task.type.rpartition("/")[2].replace("_", "-")],
        loading=plan.companions.loading.replace("{folder}", folder) or "\n\n".join(filter(None, separate)),
        facts=[
            *((f"component `{root}`", _described(own) or root) for root, own in built.items()),
            ("weights", "the moving average" if plan.planner.averaged else "as trained"),
            *_adapters(plan),
            ("dtype", _dtypes([spec.dtype for part in plan.parts for spec in part.tensors])),
            *[("started from the weights of", _origin(path)) for path in origins],
            ("steps", str(step)),
            ("samples seen", f"{float(facts.get('samples', 0)):.0f}"),
            ("seed", str(facts.get("seed", config.run.seed))),
            ("ranks", str(manifest.get("world", "unknown"))),
        ],
        settings={key: value for key, value in to_mapping(config).items() if key in _SECTIONS and value},
        data=_data(source),
        metrics=facts.get("metrics", {}),
        made_with=_versions(source),
    )
    return render(card)


def _origin(path: str) -> str:
    """Where weights came from; what is in the cache of the hub by its name there."""
    found = re.search(rf"{HUB.pattern}/snapshots/(\w+)", path)
    return f"{found[1]}/{found[2]} at {found[3][:8]}" if found else path


def _data(source: OpenedCheckpoint) -> list[tuple[str, str, str, str]]:
    """A row for each dataset: split, type, rows, and the checksums of its files."""
    found = []
    for split, row in source.manifest.get("data", {}).items():
        sums = ", ".join(f"{key} {digest[:16]}" for key, digest in row.get("files", {}).items())
        found.append((split, str(row.get("type")), str(row.get("rows")), sums or "none"))
    return found


def _adapters(plan: ExportPlan) -> Iterator[tuple[str, str]]:
    """A row for each adapter."""
    held = "not merged" if plan.adapters_alone else "merged into the weights"
    for part in plan.parts:
        for name, scales in part.adapters.items():
            first = next(iter(scales.values()))
            kind = "DoRA" if first.dora else {"lokr": "LoKr", "loha": "LoHa"}.get(first.kind, "LoRA")
            layers = plural(len(scales), "layer")
            text = f"{kind} of rank {first.rank}, alpha {first.alpha:g}, in {layers}, {held}"
            yield f"adapter `{name}`", text


def _described(component: Registered | None) -> str:
    if component is None:
        return ""
    return f"{component.qualified} ({component.distribution or 'a local file'} {component.version or ''})"


def _licence(components: Iterable[Registered | None]) -> str | None:
    """The licence of the components, if all have the same one."""
    licences = {one.component.licence if one is not None else None for one in components}
    return licences.pop() if len(licences) == 1 else None


def _dtypes(kinds: Sequence[torch.dtype]) -> str:
    counts = Counter(str(kind).removeprefix("torch.") for kind in kinds)
    return ", ".join(f"{name} ({plural(count, 'tensor')})" for name, count in counts.most_common())


def _versions(source: OpenedCheckpoint) -> list[tuple[str, str]]:
    """Versions of the components' distributions, Python, torch, and the mm-core that wrote the files."""
    manifest = source.manifest
    plugins = {str(row.get("distribution")): str(row.get("version")) for row in manifest.get("plugins", ())}
    stack = {str(key): str(value) for key, value in manifest.get("devices", {}).items()}
    python = str(manifest.get("versions", {}).get("python", "unknown"))
    export = ("mm-core, for these files", __version__)
    return [*plugins.items(), ("python", python), *stack.items(), export]
