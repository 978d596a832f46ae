"""What the card of an export says: gathered from the checkpoint, its manifest and its config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mm_core import __version__
from mm_core.config.dump import to_mapping
from mm_core.config.schema import RunConfig
from mm_core.contracts import Pretrained
from mm_core.plan import walk_components
from mm_core.plugin.registry import Registry
from mm_core.train.checkpoint_reading import read_facts, read_run_manifest
from mm_core.weights.format import Layout
from mm_core.weights.model_card import Card, render

_SECTIONS = ("task", "train", "optimizer", "lr_schedule", "ema", "engine", "init_from")
_HUB = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def card_of(
    source: Path,
    config: RunConfig,
    registry: Registry,
    form: str,
    written: Mapping[str, tuple[nn.Module, Layout | None, Sequence[torch.dtype]]],
    weights: str,
    folder: str,
) -> str:
    """The text of README.md.

    Args:
        source: the checkpoint. config: of its run. form: the format's qualified name.
        written: by component: its module, its layout (none for an adapter), the dtype of each tensor.
        weights: what was taken, in words. folder: the export's name.
    """
    facts, manifest = read_facts(source), read_run_manifest(source)
    step = facts["step"]
    layouts = [layout for _, layout, _ in written.values() if layout is not None]
    origins = list(_origins(config, facts, {root: module for root, (module, _, _) in written.items()}))
    hubs = [f"{found[1]}/{found[2]}" for origin in origins if (found := _HUB.search(origin))]
    names = ", ".join(f"`{root}`" for root in written)
    loading = [layout.loading.replace("{folder}", folder) for layout in layouts if layout.loading]
    card = Card(
        title=f"{config.run.name}, step {step}",
        summary=f"{names} of the run `{config.run.name}` after {step} steps, in the format `{form}`."
        f" In mm_core, `init_from: {{path: {folder}}}` begins a run with it.",
        library=next((layout.library for layout in layouts if layout.library), "mm_core"),
        licence=_licence(config, registry, written),
        base_model=hubs[0] if hubs else None,
        tags=["mm_core", config.task.type.rpartition("/")[2].replace("_", "-")],
        loading="\n\n".join(loading),
        facts=[
            *((f"component `{root}`", _described(config, registry, root)) for root in written),
            ("weights", weights),
            ("dtype", _dtypes([kind for _, _, kinds in written.values() for kind in kinds])),
            *[("began with the weights of", origin) for origin in origins],
            ("steps", str(step)),
            ("samples seen", f"{float(facts.get('samples', 0)):.0f}"),
            ("seed", str(facts.get("seed", config.run.seed))),
            ("ranks", str(manifest.get("world", "unknown"))),
        ],
        settings={key: value for key, value in to_mapping(config).items() if key in _SECTIONS and value},
        data=[
            (
                split,
                str(row.get("type")),
                str(row.get("rows")),
                ", ".join(f"{key} {digest[:16]}" for key, digest in row.get("files", {}).items()) or "none",
            )
            for split, row in manifest.get("data", {}).items()
        ],
        metrics=facts.get("metrics", {}),
        made_with=_versions(manifest),
    )
    return render(card)


def _origins(config: RunConfig, facts: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """The folders that the run began with."""
    for module in modules.values():
        if isinstance(module, Pretrained) and module.weights_from is not None:
            yield module.weights_from.path
    if isinstance(imported := facts.get("imported"), Mapping):
        yield str(imported.get("path"))
    elif config.init_from is not None:
        yield config.init_from.path


def _described(config: RunConfig, registry: Registry, root: str) -> str:
    found = dict(walk_components(config.task)).get(root)
    if found is None:
        return root
    registered = registry.resolve(found.kind, found.type)
    return f"{registered.qualified} ({registered.distribution or 'a local file'} {registered.version or ''})"


def _licence(config: RunConfig, registry: Registry, roots: Mapping[str, Any]) -> str | None:
    """That of the components, where they have one and the same."""
    known = dict(walk_components(config.task))
    licences = {
        registry.resolve(known[root].kind, known[root].type).component.licence if root in known else None
        for root in roots
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
