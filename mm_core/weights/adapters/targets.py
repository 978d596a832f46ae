"""The linear layers that an adapter's config names, and the rank and scale of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.contracts import TaskModule
from mm_core.errors import PlanError, nearest
from mm_core.modules.adapter_layers import adapter_of
from mm_core.modules.patterns import match
from mm_core.parallel.layout import like_blocks
from mm_core.weights.adapters.files import AdapterScale
from mm_core.weights.adapters.kinds import blocks_of

KEY = "train.adapters"

_END = re.compile(r"[^.]+(\.\d+)*\Z")
"""The last name of a path, with the numbers after it."""

_PER_SAMPLE = re.compile(
    r"(\A|[._])(ada|adaln|mod|modulation|norm\d*|time|timestep|embedder)([._]|\Z)", re.IGNORECASE
)
"""Names of layers that compute one vector a sample, or prepare inputs."""


def scales_by_layer(
    task: TaskModule, adapter: AdapterConfig, layers: Collection[str]
) -> dict[str, AdapterScale]:
    """The rank and scale of each linear layer that an adapter's targets match, in the order of `layers`."""
    if adapter.targets == "auto":
        chosen = _in_blocks(task, layers)
    else:
        chosen = {path for hit in _hits(task, adapter, adapter.targets, layers).values() for path in hit}
    excluded = _hits(task, adapter, adapter.exclude, layers)
    _check_within(adapter, "exclude", excluded, chosen)
    chosen = chosen.difference(*excluded.values())
    if not chosen:
        raise PlanError(
            f"exclude leaves the adapter {adapter.name!r} no module",
            where=KEY,
            hint="leave out fewer modules",
        )
    of_ranks = _hits(task, adapter, adapter.ranks, layers)
    of_alphas = _hits(task, adapter, adapter.alphas, layers)
    _check_within(adapter, "ranks", of_ranks, chosen)
    _check_within(adapter, "alphas", of_alphas, chosen)
    ranks, alphas = _by_layer(of_ranks, adapter.ranks), _by_layer(of_alphas, adapter.alphas)
    found = {}
    for path in (path for path in layers if path in chosen):
        rank = int(ranks.get(path, adapter.rank))
        alpha = alphas.get(path, adapter.alpha or rank)
        blocks = None
        if adapter.decompose_factor is not None:
            weight = task.get_parameter(f"{path}.weight")
            blocks = blocks_of(weight.shape[0], weight.shape[1], adapter.decompose_factor)
        found[path] = AdapterScale(rank, alpha, adapter.dora, adapter.rslora, adapter.kind, blocks)
    return found


def _in_blocks(task: TaskModule, layers: Collection[str]) -> set[str]:
    """The linear layers of attention and feed-forward in the repeated blocks of the trained components.

    A block's attention and feed-forward have several linear layers each, or lie in the block itself (FLUX's
    single blocks); a part of it with one linear layer is modulation, which computes one vector a sample.
    Where modulation has several, and in blocks of embedders, names show it.

    Raises:
        PlanError: no component has such blocks.
    """
    found = set()
    blocks = [like_blocks(task.get_submodule(root), root, least=1) for root in task.trainable]
    for block in chain(*blocks):
        own = [path.removeprefix(f"{block}.") for path in layers if path.startswith(f"{block}.")]
        counts = Counter(path.partition(".")[0] for path in own)
        if max(counts.values(), default=0) > 1:
            own = [path for path in own if "." not in path or counts[path.partition(".")[0]] > 1]
            found |= {full for path in own if not _PER_SAMPLE.search(full := f"{block}.{path}")}
    if not found:
        raise PlanError(
            f"'auto' finds no attention or feed-forward in repeated blocks of {', '.join(task.trainable)}",
            where=f"{KEY}: targets",
            hint="name the modules: patterns, or ends of their paths",
        )
    return found


def _check_within(
    adapter: AdapterConfig, field: str, hits: Mapping[str, set[str]], chosen: Collection[str]
) -> None:
    """PlanError for a pattern of a field that matches none of the layers that the adapter has there."""
    for target, hit in hits.items():
        if hit.isdisjoint(chosen):
            ends = dict.fromkeys(found[0] for path in sorted(chosen) if (found := _END.search(path)))
            raise PlanError(
                f"{target!r} in {field} of the adapter {adapter.name!r} matches none of its layers",
                where=KEY,
                accepted=f"patterns of its layers, or ends of their paths: {', '.join(map(repr, ends))}",
                hint=f"correct it, or remove it from {field}",
            )


def _by_layer(hits: Mapping[str, set[str]], values: Mapping[str, float]) -> dict[str, float]:
    return {path: values[target] for target, hit in hits.items() for path in hit}


def _hits(
    task: TaskModule, adapter: AdapterConfig, targets: Iterable[str], layers: Collection[str]
) -> dict[str, set[str]]:
    """The linear layers that each target matches; PlanError for a target that matches none."""
    found = {}
    for target, above in _named(task, adapter, targets):
        hit = {path for path in layers if any(path == a or path.startswith(f"{a}.") for a in above)}
        if not hit:
            raise _no_target(task, adapter, target, above, layers)
        found[target] = hit
    return found


def _named(
    task: TaskModule, adapter: AdapterConfig, targets: Iterable[str]
) -> Iterator[tuple[str, list[str]]]:
    """Each target of an adapter (a pattern, or the end of a path), and the modules that it matches."""
    held = (task.get_submodule(root).named_modules(prefix=root) for root in task.trainable)
    paths = [path for modules in held for path, _ in modules if not _inside_adapted(path)]
    for target in targets:
        if (root := target.partition(".")[0]) in task.frozen:
            raise PlanError(
                f"the adapter {adapter.name!r} is for {root}, which computes without gradients: its outputs"
                " are cached, or computed before the step, so an adapter there would never train",
                where=KEY,
                accepted=f"modules of {', '.join(task.trainable)}",
            )
        if "{" in target:
            yield target, match([target], paths, f"{KEY} ({adapter.name}): targets")
        else:
            yield target, [path for path in paths if path == target or path.endswith(f".{target}")]


def skipped_layers(task: TaskModule, adapter: AdapterConfig) -> dict[str, str]:
    """The layers that match an adapter's targets but cannot have one: path in the task -> kind of layer.

    Only linear layers can have adapters.

    Args:
        task: with its adapters in place.
        adapter: the adapter's section of the config.
    """
    targets = () if adapter.targets == "auto" else adapter.targets
    above = [path for _, named in _named(task, adapter, targets) for path in named]
    return {name: kind for path in above for name, kind in _other_layers(task, path).items()}


def _other_layers(task: TaskModule, path: str) -> dict[str, str]:
    """Convolutions and embeddings at or below a path."""
    return {
        f"{path}.{name}".rstrip("."): type(module).__name__
        for name, module in task.get_submodule(path).named_modules()
        if isinstance(module, _ConvNd | nn.Embedding | nn.EmbeddingBag)
    }


def _inside_adapted(path: str) -> bool:
    return "base_layer" in path.split(".") or adapter_of(f"{path}.x.weight") is not None


def _no_target(
    task: TaskModule, adapter: AdapterConfig, target: str, above: Sequence[str], layers: Iterable[str]
) -> PlanError:
    """The error for a target without linear layers; `above` are the modules that it matches."""
    named = [task.get_submodule(path) for path in above]
    if named and all(isinstance(module, NonDynamicallyQuantizableLinear) for module in named):
        return PlanError(
            f"the target {target!r} of the adapter {adapter.name!r} is a layer that nn.MultiheadAttention"
            " never calls: an adapter there would do nothing",
            where=KEY,
            hint="remove it from the adapter's targets",
        )
    kinds = sorted({kind for path in above for kind in _other_layers(task, path).values()})
    ends = list(dict.fromkeys(found[0] for path in layers if (found := _END.search(path)) is not None))
    near = nearest(target.rpartition(".")[2], ends, 3) or ends[:5]
    return PlanError(
        f"the target {target!r} of the adapter {adapter.name!r} matches no linear layer"
        + (f", but {' and '.join(kinds)}: only linear layers can have adapters" if kinds else ""),
        where=KEY,
        accepted=f"patterns of modules, or ends of paths such as {', '.join(map(repr, near))}"
        if near
        else "no target: the component has no linear layer",
    )
