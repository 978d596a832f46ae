"""What the card of an export says: gathered from the checkpoint, its manifest and its config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from mm_core import __version__
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.config.dump import to_mapping
from mm_core.config.schema import RunConfig
from mm_core.contracts import TaskModule
from mm_core.interchange.export_plan import Part
from mm_core.interchange.model_card import Card, render
from mm_core.loading.provenance import given_weights, own_weights
from mm_core.plan import walk_components

_SECTIONS = ("task", "train", "optimizer", "lr_schedule", "ema", "engine", "init_from")
_HUB = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def card_of(
    source: OpenedCheckpoint,
    config: RunConfig,
    form: str,
    task: TaskModule,
    parts: Sequence[Part],
    averaged: bool,
    adapters_alone: bool,
    folder: str,
    loading: str = "",
) -> str:
    """The text of README.md.

    Args:
        source: the checkpoint. config: of its run. form: the format's qualified name.
        task: with the components. parts: what is written. averaged: of the moving average.
        adapters_alone: without the weights below them. folder: the export's name. loading: Python that
            loads the whole of it, where its parts are not loaded one by one.
    """
    facts, manifest = source.facts, source.manifest
    step = facts["step"]
    roots = list(dict.fromkeys(part.root for part in parts))
    origins = list(_origins(config, facts, [task.get_submodule(root) for root in roots]))
    hubs = [f"{found[1]}/{found[2]}" for origin in origins if (found := _HUB.search(origin))]
    names = ("adapters of " if adapters_alone else "") + ", ".join(f"`{root}`" for root in roots)
    begins = (
        f" In mm_core, `init_from: {{path: {folder}}}` begins a run with it." if not adapters_alone else ""
    )
    separate = [_loading(part, folder) for part in parts if part.loading]
    card = Card(
        title=f"{config.run.name}, step {step}",
        summary=f"{names} of the run `{config.run.name}` after {step} steps, in the format `{form}`.{begins}",
        library=next((part.library for part in parts if part.library), "mm_core"),
        licence=_licence(config, roots),
        base_model=hubs[0] if hubs else None,
        tags=["mm_core", config.task.type.rpartition("/")[2].replace("_", "-")],
        loading=loading.replace("{folder}", folder) or "\n\n".join(separate),
        facts=[
            *((f"component `{root}`", _described(config, root)) for root in roots),
            ("weights", "the moving average" if averaged else "as trained"),
            *_adapters(parts, adapters_alone),
            ("dtype", _dtypes([spec.dtype for part in parts for spec in part.tensors])),
            *[("began with the weights of", origin) for origin in origins],
            ("steps", str(step)),
            ("samples seen", f"{float(facts.get('samples', 0)):.0f}"),
            ("seed", str(facts.get("seed", config.run.seed))),
            ("ranks", str(manifest.get("world", "unknown"))),
        ],
        settings={key: value for key, value in to_mapping(config).items() if key in _SECTIONS and value},
        data=_data(manifest),
        metrics=facts.get("metrics", {}),
        made_with=_versions(manifest),
    )
    return render(card)


def _data(manifest: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """A row a dataset: split, type, rows, and the sums of its files."""
    found = []
    for split, row in manifest.get("data", {}).items():
        sums = ", ".join(f"{key} {digest[:16]}" for key, digest in row.get("files", {}).items())
        found.append((split, str(row.get("type")), str(row.get("rows")), sums or "none"))
    return found


def _loading(part: Part, folder: str) -> str:
    place = PurePath(folder, part.folder) if part.folder not in ("", ".") else PurePath(folder)
    return part.loading.replace("{folder}", str(place))


def _adapters(parts: Sequence[Part], alone: bool) -> Iterator[tuple[str, str]]:
    """A row an adapter."""
    for part in parts:
        for name, scales in part.adapters.items():
            first = next(iter(scales.values()))
            kind = "DoRA" if first.dora else "LoRA"
            held = "alone" if alone else "merged into the weights"
            text = f"{kind} of rank {first.rank}, alpha {first.alpha:g}, in {len(scales)} layers, {held}"
            yield f"adapter `{name}`", text


def _origins(config: RunConfig, facts: Mapping[str, Any], modules: Sequence[nn.Module]) -> Iterator[str]:
    """The folders that the run began with."""
    named = [*(own_weights(module) for module in modules), given_weights(config, facts)]
    yield from (path for path in named if path is not None)


def _described(config: RunConfig, root: str) -> str:
    found = dict(walk_components(config.task)).get(root)
    if found is None:
        return root
    registered = config.registry.resolve(found.kind, found.type)
    return f"{registered.qualified} ({registered.distribution or 'a local file'} {registered.version or ''})"


def _licence(config: RunConfig, roots: Sequence[str]) -> str | None:
    """That of the components, where they have one and the same."""
    known = dict(walk_components(config.task))
    named = [known.get(root) for root in roots]
    licences = {
        config.registry.resolve(one.kind, one.type).component.licence if one else None for one in named
    }
    return licences.pop() if len(licences) == 1 else None


def _dtypes(kinds: Sequence[torch.dtype]) -> str:
    counts = Counter(str(kind).removeprefix("torch.") for kind in kinds)
    return ", ".join(f"{name} ({count} tensors)" for name, count in counts.most_common())


def _versions(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Distributions of the components, Python, torch, and what wrote the files."""
    plugins = {str(row.get("distribution")): str(row.get("version")) for row in manifest.get("plugins", ())}
    stack = {str(key): str(value) for key, value in manifest.get("devices", {}).items()}
    python = str(manifest.get("versions", {}).get("python", "unknown"))
    export = ("mm-core, for these files", __version__)
    return [*plugins.items(), ("python", python), *stack.items(), export]
