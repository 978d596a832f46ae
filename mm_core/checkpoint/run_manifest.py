"""What a run is made of: what a later resume is compared with."""

from __future__ import annotations

import hashlib
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
from mm_core.contracts import Dataset
from mm_core.device import device_stack
from mm_core.plan import RunPlan
from mm_core.plugin.ranks import check_ranks_agree
from mm_core.runtime.ranks import Ranks
from mm_core.schema.fields import ComponentConfig

_LIBRARIES = ("transformers", "diffusers", "peft", "accelerate", "tokenizers", "safetensors", "torchao")
"""What computes, converts or makes tokens beside torch; with what the plugins of a run require."""
_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt")
"""A folder with one of these is a tokenizer's."""
_WORDS = (
    *("tokenizer*", "vocab*", "merges*", "*spiece*.model", "*.bpe.model", "*.spm", "*.tiktoken"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "*processor_config.json"),
)
_LARGEST = 128 * 2**20  # bytes of a file that is read for it


def run_manifest(
    config: RunConfig,
    plan: RunPlan,
    datasets: Mapping[str, Dataset],
    adapters: Sequence[Document] = (),
    base: Sequence[Document] = (),
) -> Document:
    """Resolved config (what came from the environment as it was written, with a trace of its value),
    components with their distributions and versions, those of libraries, data fingerprints, device stack,
    world; plain values.

    adapters: where they are, by `record_of`. base: by `ExternalWeights.rows`, what checkpoints
    leave to files.
    """
    return {
        "config": to_mapping(config),
        "environment": environment_traces(config),
        "adapters": [*adapters],
        "base": [*base],
        "plugins": [asdict(component) for component in plan.components],
        "data": {
            name: fingerprint(section, datasets[name])
            for name, section in config.data.splits.items()
            if name in datasets
        },
        "devices": device_stack(),
        "versions": {"python": platform.python_version(), "mm_core": mm_core.__version__},
        "libraries": library_versions({component.distribution for component in plan.components}),
        "world": plan.engine.world,
    }


def library_versions(plugins: Iterable[str] = ()) -> dict[str, str]:
    """The installed libraries that models are made of, by distribution. plugins: distributions whose own
    requirements count too; those of mm-core do not (most of them draw, log or read)."""
    names = set(_LIBRARIES)
    for plugin in set(plugins) - {"mm-core", ""}:
        with suppress(PackageNotFoundError):  # a plugin of one file is no distribution
            wanted = [Requirement(text) for text in requires(plugin) or ()]
            names |= {one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})}
    found = {}
    for name in sorted(names - {"mm-core", "torch"}):  # they stand elsewhere
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def environment_traces(config: RunConfig) -> dict[str, str]:
    """Config key -> 16 bits of a hash of the value that the environment gave it.

    So few that they tell a change, as a rule, and nothing of a secret.
    """
    values = to_mapping(replace(config, literals={}))
    return {key: _trace(_at(values, key)) for key in config.literals}


def _at(value: Any, key: str) -> object:
    """What stands at a dotted key; lists are entered by number."""
    for name in key.split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def _trace(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:4]


def fingerprint(section: ComponentConfig, dataset: Dataset) -> Document:
    """A dataset by its number of rows and, where its options name files, the sha256 of each; where they name
    a tokenizer's folder, one of all the files that make tokens.

    Videos and weights are not read: a file that was exchanged under the same name is not noticed.
    """
    listed = {
        key: digest for key, path in _paths(section.options) if (digest := _digest(Path(path))) is not None
    }
    return {"type": section.type, "rows": len(dataset), "files": listed}


def _paths(value: object, key: str = "") -> Iterator[tuple[str, str | Path]]:
    """(dotted key, text) of everything in a value that may be a path; lists are entered by number."""
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
            return _digest_of_words(path)
        return _digest_of_file(path) if path.is_file() else None
    except OSError:
        return None


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_words(folder: Path) -> str | None:
    """Of what a folder makes tokens by; None for one that holds no tokenizer, which may be one of a million
    videos and is not listed."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return None
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if any(fnmatch(path.name, pattern) for pattern in _WORDS) and path.is_file():
            size = path.stat().st_size
            # A file of such a size is no vocabulary.
            content = _digest_of_file(path) if size <= _LARGEST else str(size)
            found.update(f"{path.name} {content}\n".encode())
    return found.hexdigest()


def check_plugins(config: RunConfig) -> None:
    """PluginError, on every rank, when the ranks have other plugins, libraries, or versions of these."""
    registry = config.registry
    libraries = library_versions(plugin.distribution or "" for plugin in registry.plugins)
    own = registry.fingerprint_table(), {"torch": str(torch.__version__), **libraries}
    plugins, versions = zip(*Ranks.current().gather(own), strict=True)
    check_ranks_agree(plugins)
    hint = "compare `pip list` on the machines of these ranks"
    check_ranks_agree(versions, "libraries", "not installed", hint)
