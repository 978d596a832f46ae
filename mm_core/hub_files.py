"""Which files of a repository on the hub a run reads: those of our formats, and of each only one set."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from mm_core.errors import MMError
from mm_core.hub import PREFIX, HubName

_INDEX = ".safetensors.index.json"
_STEMS = ("model", "diffusion_pytorch_model")
_SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of configs, tokenizers and processors. They are fetched of the whole repository: a tokenizer is
beside its text encoder."""
_ADAPTERS = ("adapter_model", "pytorch_lora_weights")  # starts of names of adapters, which may be two
_HALF = re.compile(r"[._](?:fp|bf)16(?=\.safetensors$)")  # in the name of a variant


@dataclass(frozen=True)
class Use:
    """What a run reads of a name: its weights too, or only small files; its Python files too."""

    name: HubName
    weights: bool = True
    code: bool = False


def chosen(use: Use, files: Collection[str]) -> list[str]:
    """The files of a repository that our formats read; a pickle only where it is named itself."""
    inside, where = use.name.inside, str(use.name)
    chosen = [file for file in files if file.endswith((*_SMALL, ".py") if use.code else _SMALL)]
    if inside in files:
        return [*chosen, inside]
    folder = f"{inside}/" if inside else ""
    below = [file.removeprefix(folder) for file in files if file.startswith(folder)]
    having = {PurePosixPath(file).parent.as_posix() for file in files if file.endswith(".safetensors")}
    accepted = ", ".join(f"{PREFIX}{use.name.repo}/{each}" for each in sorted(having - {"."})[:5]) or None
    if not below:
        place = f"folder or file {inside}" if inside else "files"
        what = f"{use.name.repo} has no {place} at {use.name.revision}"
        raise MMError(what, where=where, accepted=accepted)
    if not use.weights:
        return chosen
    parts = [""]
    subfolders = sorted({f"{file.partition('/')[0]}/" for file in below if "/" in file})
    if "model_index.json" in below:  # a pipeline; weights in its top folder are the same in another layout
        parts = subfolders
    elif not _weights(below, ""):  # as Wan-AI publishes two experts
        parts = [each for each in subfolders if f"{each}config.json" in below]
    weights = []
    for part in parts:
        found = _weights(below, part)
        single = [file for file in found if not file.startswith(_ADAPTERS) and "-of-" not in file]
        if len(single) > 1:
            place = folder + part
            what = f"{use.name.repo} has {len(single)} models of one file each in {place or 'its top folder'}"
            named = [str(replace(use.name, inside=place + file)) for file in single]
            raise MMError(what, where=where, accepted=", ".join(named))
        weights += [f"{folder}{part}{file}" for file in found]
    if not weights:
        what = f"{use.name.repo} has no safetensors in {inside or 'its top folder'}"
        raise MMError(what, where=where, accepted=accepted or "the name of a file in it")
    return [*chosen, *weights]


def _weights(files: Sequence[str], part: str) -> list[str]:
    """The weights files in a folder that `open_stored` reads: one set, without its variants."""
    names = [file.removeprefix(part) for file in files if file.startswith(part)]
    own = {file for file in names if "/" not in file and file.endswith((_INDEX, ".safetensors"))}
    adapter = {"adapter_model.safetensors"} & own if "adapter_config.json" in names else set()
    for stem in _STEMS:
        shards = {file for file in own if file.startswith(f"{stem}-")} if f"{stem}{_INDEX}" in own else set()
        single = {f"{stem}.safetensors"} & own
        if found := (single or shards) if stem == "model" else (shards or single):
            return sorted(found | adapter)
    halves = {file for file in own if _HALF.sub("", file) in own - {file}}
    return sorted(file for file in own - halves if file.endswith(".safetensors"))
