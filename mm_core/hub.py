"""Folders and files of the Hugging Face Hub by their names: `hub:org/name[@revision][/folder or file]`.

A name is a place in the cache of `huggingface_hub`, which the user's other tools share. Nothing here uses the
network; `mm_core.fetching` does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from mm_core.errors import CheckpointError, ConfigError

PREFIX = "hub:"
_REVISIONS = "MM_HUB_REVISIONS"
"""Environment variable with the commits of a run's repositories as JSON, `{"org/name@main": "..."}`: ranks
inherit it, read the same files and ask nobody."""

_NAME = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@(refs/pr/\d+|[^/@\s]+))?(?:/(\S.*?))?/?")
_BARE = re.compile(r"\w[\w.-]*/\w[\w.-]*(?:/[\w./-]+)?")
_LOCAL = ("ckpt", "checkpoints", "models", "weights", "runs", "data")  # folders of the user, and no owners
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """The name of a folder or file on the hub.

    Attributes:
        repo: `org/name`.
        revision: a branch, a tag or a commit.
        inside: path in the repository; "" is its top folder.
    """

    repo: str
    revision: str = "main"
    inside: str = ""

    @classmethod
    def of(cls, text: str) -> HubName:
        """Parses a name.

        Raises:
            ConfigError: it is no such name.
        """
        found = _NAME.fullmatch(text)
        parts = [part for group in (found[1], found[3] or "x") for part in group.split("/")] if found else []
        if found is None or {"", ".", ".."}.intersection([*parts, found[2]]):
            accepted = "hub:org/name, hub:org/name@revision, hub:org/name/folder"
            raise ConfigError(f"{text!r} names nothing on the hub", accepted=accepted)
        return cls(found[1], found[2] or "main", PurePosixPath(found[3]).as_posix() if found[3] else "")

    @classmethod
    def at(cls, path: Path) -> HubName | None:
        """The name, with its commit, of a path in the cache; None for any other path."""
        from huggingface_hub import constants

        with suppress(ValueError):
            store, held, commit, *inside = path.relative_to(constants.HF_HUB_CACHE).parts
            if store.startswith("models--") and held == "snapshots":
                return cls(store.removeprefix("models--").replace("--", "/"), commit, "/".join(inside))
        return None

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{PREFIX}{self.repo}{revision}" + (f"/{self.inside}" if self.inside else "")

    @property
    def key(self) -> str:
        """The repository at its revision: `org/name@main`."""
        return f"{self.repo}@{self.revision}"

    @property
    def store(self) -> Path:
        """The folder of the repository in the cache."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"models--{self.repo.replace('/', '--')}"

    @property
    def decided(self) -> str | None:
        """The commit that the name stands for whatever happens on the hub: itself, or that of this run."""
        return self.revision if _COMMIT.fullmatch(self.revision) else _decided().get(self.key)

    @property
    def commit(self) -> str | None:
        """The commit that the name stands for now, as far as the cache knows."""
        if (found := self.decided) is not None:
            return found
        with suppress(OSError):
            return (self.store / "refs" / self.revision).read_text().strip()
        return None

    @property
    def path(self) -> Path:
        """Where the folder or file is in the cache, once it is fetched."""
        return self.store / "snapshots" / (self.commit or self.revision) / self.inside

    @property
    def to_fetch(self) -> str:
        """The command that fetches the repository, as a hint."""
        return f"where there is a network: hf download {self.repo} --revision {self.revision}"

    def pinned(self) -> HubName:
        """The name with its commit in place of a branch or tag, where that is known."""
        return replace(self, revision=self.commit or self.revision)


def decide(commits: Mapping[str, str]) -> None:
    """From now on this process and those that it starts read repositories at these commits.

    Args:
        commits: `org/name@revision` -> commit.
    """
    os.environ[_REVISIONS] = json.dumps({**_decided(), **commits})


def _decided() -> dict[str, str]:
    with suppress(ValueError):
        return {str(key): str(commit) for key, commit in json.loads(os.environ.get(_REVISIONS, "{}")).items()}
    return {}


def no_folder(path: Path, accepted: str, hint: str) -> CheckpointError:
    """The error for a folder of a model that does not exist; for one on the hub it has its name there.

    Args:
        path: of the folder.
        accepted: what the folder may be.
        hint: what to do where it is a folder of the user.
    """
    if name := HubName.at(path):
        return CheckpointError("it is not in the cache", where=str(name), hint=name.to_fetch)
    return CheckpointError("this folder does not exist", where=str(path), accepted=accepted, hint=hint)


def hint_for(path: str | Path) -> str | None:
    """A hint for a path at which nothing is, if it has the form of a name on the hub; else None."""
    text = str(path)
    top = text.partition("/")[0]
    if _BARE.fullmatch(text) is None or top in _LOCAL or Path(top).exists():
        return None
    return f"for a model on the hub, write {PREFIX}{text}"
