"""The manifest of a run: config, components, versions and data, which a later resume is compared with."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass, replace
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

import mm_core
from mm_core.checkpoint.files.layout import Document
from mm_core.config.dump import to_mapping
from mm_core.config.sections import RunConfig
from mm_core.data.loading.plain import AnyDataset, rows_of
from mm_core.device import device_stack
from mm_core.plan import RunPlan
from mm_core.plugin.ranks import check_ranks_agree
from mm_core.plugin.registry import Registry
from mm_core.runtime.ranks import Ranks
from mm_core.schema.fields import ComponentConfig
from mm_core.schema.nodes import leaves

_LIBRARIES = ("transformers", "diffusers", "peft", "accelerate", "tokenizers", "safetensors", "torchao")
"""Libraries besides torch that compute, convert or tokenize; requirements of the run's plugins are added."""
_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt")
"""A folder with one of these files contains a tokenizer."""
_VOCABULARY = (
    *("tokenizer*", "vocab*", "merges*", "*spiece*.model", "*.bpe.model", "*.spm", "*.tiktoken"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "*processor_config.json"),
)
_LARGEST = 128 * 2**20  # bytes; larger files count by their size only


def run_manifest(
    config: RunConfig,
    plan: RunPlan,
    data: Mapping[str, Document],
    adapters: Sequence[Document] = (),
    base: Sequence[Document] = (),
) -> Document:
    """The manifest of a run, as plain JSON values, which a later resume is compared with.

    It contains the resolved config (environment variables by name, with a short hash of their values), the
    components with their distributions and versions, library versions, data fingerprints, the device stack
    and the number of ranks.

    Args:
        config: the checked config.
        plan: the run's plan.
        data: from `fingerprints`.
        adapters: which layers have adapters, from `record_of`.
        base: frozen weights that checkpoints leave in other files, from `ExternalWeights.rows`.
    """
    return {
        "config": to_mapping(config),
        "hub": commits_read(config),
        "environment": environment_traces(to_mapping(replace(config, literals={})), config.literals),
        "adapters": [*adapters],
        "base": [*base],
        "plugins": [asdict(component) for component in plan.components],
        "data": {**data},
        "devices": device_stack(),
        "versions": {"python": platform.python_version(), "mm_core": mm_core.__version__},
        "libraries": library_versions({component.distribution for component in plan.components}),
        "world": plan.engine.world,
    }


def launch_facts(config: RunConfig) -> dict[str, str]:
    """What must be the same on all hosts of a run: versions, plugins and config keys, but for the values of
    environment variables."""
    plugins = {f"plugin {name}": text for name, text in config.registry.fingerprint_table().items()}
    versions = {"mm_core": mm_core.__version__, "torch": torch.__version__}
    keys = {key: json.dumps(value, default=str) for key, value in leaves(to_mapping(config))}
    return versions | plugins | keys


def library_versions(plugins: Iterable[str] = ()) -> dict[str, str]:
    """Versions of the installed libraries that can change what a run computes, by distribution.

    Args:
        plugins: distributions whose requirements are included; those of mm-core are not, since most of them
            draw, log or read.
    """
    names = set(_LIBRARIES)
    for plugin in set(plugins) - {"mm-core", ""}:
        with suppress(PackageNotFoundError):  # a one-file plugin is not a distribution
            wanted = [Requirement(text) for text in requires(plugin) or ()]
            names |= {one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})}
    found = {}
    for name in sorted(names - {"mm-core", "torch"}):  # these are recorded elsewhere
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def environment_traces(values: Document, keys: Iterable[str]) -> dict[str, str]:
    """Config key -> 16 bits of a hash of the environment variable's value, to detect a change of the value.

    So few bits reveal most changes, and nothing about a secret.

    Args:
        values: the config with the values of environment variables.
        keys: those that the environment sets.
    """
    return {key: _trace(_at(values, key)) for key in keys}


def _at(value: Any, key: str) -> object:
    """The value at a dotted key; list items are addressed by number."""
    for name in key.split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def _trace(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:4]


def fingerprints(
    sections: Mapping[str, ComponentConfig], datasets: Mapping[str, AnyDataset], ranks: Ranks
) -> dict[str, Document]:
    """Fingerprints of a run's datasets, by split. Called by all ranks."""
    return {name: fingerprint(sections[name], dataset, ranks) for name, dataset in datasets.items()}


def fingerprint(section: ComponentConfig, dataset: AnyDataset, ranks: Ranks) -> Document:
    """Fingerprint of a run's dataset: its number of rows, and the sha256 of each file in its options.

    A tokenizer folder has one sha256 of its vocabulary files. A dataset with `digests` adds its own by keys
    of the options; rank 0 computes them. Videos and weights are not read: a file replaced under the same name
    is not noticed.
    """
    listed = {
        key: digest for key, path in _paths(section.options) if (digest := _digest(Path(path))) is not None
    }
    author: Any = dataset
    while author is not None and not hasattr(author, "digests"):  # in buckets, or in the feature cache
        author = getattr(author, "dataset", None)
    if author is not None:
        listed |= ranks.on_first("reading captions", author.digests)
    return {"type": section.type, "rows": rows_of(dataset), "files": listed}


def _paths(value: object, key: str = "") -> Iterator[tuple[str, str | Path]]:
    """(dotted key, text) of everything in a value that may be a path; list items have their number as key."""
    if isinstance(value, (str, Path)):
        yield key, value
        return
    inner: Iterable[tuple[object, object]] = ()
    if is_dataclass(value) and not isinstance(value, type):
        inner = ((field.name, getattr(value, field.name)) for field in fields(value))
    elif isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, (list, tuple)):
        inner = enumerate(value)
    for name, one in inner:
        yield from _paths(one, f"{key}.{name}" if key else str(name))


def _digest(path: Path) -> str | None:
    try:
        if path.is_dir():
            return _digest_of_tokenizer(path)
        return _digest_of_file(path) if path.is_file() else None
    except OSError:
        return None


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_tokenizer(folder: Path) -> str | None:
    """The sha256 of a tokenizer folder's vocabulary; None for a folder without a tokenizer.

    A folder without one is not listed: it may contain a million videos.
    """
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return None
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if any(fnmatch(path.name, pattern) for pattern in _VOCABULARY) and path.is_file():
            size = path.stat().st_size
            # A larger file is not a vocabulary.
            content = _digest_of_file(path) if size <= _LARGEST else str(size)
            found.update(f"{path.name} {content}\n".encode())
    return found.hexdigest()


def check_plugins(registry: Registry, ranks: Ranks) -> None:
    """Raises PluginError on every rank if the ranks have different plugins, libraries or versions."""
    libraries = library_versions(plugin.distribution or "" for plugin in registry.plugins)
    own = registry.fingerprint_table(), {"torch": str(torch.__version__), **libraries}
    plugins, versions = zip(*ranks.gather(own), strict=True)
    check_ranks_agree(plugins)
    hint = "compare `pip list` on the machines of these ranks"
    check_ranks_agree(versions, "libraries", "not installed", hint)


def check_commits(config: RunConfig, ranks: Ranks) -> None:
    """Raises PluginError on every rank if hosts have found different commits of a repository on the hub."""
    hint = "the hub changed while they started: start again, or name the commit (hub:org/name@COMMIT)"
    check_ranks_agree(ranks.gather(commits_read(config)), "files of the hub", "not fetched", hint)


def commits_read(config: RunConfig) -> dict[str, str]:
    """The commit of each repository on the hub that a run reads, by `org/name@revision`."""
    return {use.name.key: use.name.commit or "" for use in config.hub.values()}
