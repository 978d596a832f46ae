"""Configs of stored runs: which files they are, and what in them may run or be read only when allowed.

A YAML of one's own names code as one's own script would. The config of a run or checkpoint was perhaps
written by somebody else: what it names runs only where this user has trained with it, or where a flag allows
it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mm_core.errors import MMError, TrustError
from mm_core.plugin.trust.known import ALLOW, KnownCode, Piece, digest_of
from mm_core.schema.nodes import FAILED, Node

KNOWN = "known"
"""`trust_remote_code: known`: Python files of the folder run where this user has trained with them."""

_REMOTE = "trust_remote_code"
_COMMAND = ("command", "core/command")
_DESCRIBED = ("config.json", "adapter_config.json")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def is_stored(path: Path) -> bool:
    """Whether a file lies in the folder of a run or checkpoint, at whatever depth, or in that of a model that
    was published or exported."""
    places = (Path(os.path.abspath(path)), path.resolve())  # noqa: PTH100 - without `..`, with its links
    return any(_is_model(folder) or _is_run(folder) for place in places for folder in place.parents)


def _is_model(folder: Path) -> bool:
    if (folder / "model_index.json").is_file():
        return True
    described = any((folder / name).is_file() for name in _DESCRIBED)
    return described and any(True for kind in _WEIGHTS for _ in folder.glob(kind))


def _is_run(folder: Path) -> bool:
    def there(name: str) -> bool:
        return (folder / name).is_file()

    marks = ("checksums.json", ".metadata", "facts.json", "config.yaml", "manifest.json")
    # One alone is many another tool's file. `checksums.json` is gone from a checkpoint that was not finished.
    checkpoint = (there("checksums.json") or there(".metadata")) and sum(map(there, marks)) > 1
    run = there("config.yaml") and (there("manifest.json") or there("metrics.jsonl"))
    return checkpoint or run or any(True for _ in (folder / "checkpoints").glob("step_*"))


@dataclass
class Sources:
    """Of the files that a config was read from, which are a stored run's.

    stored: what the caller knows of them; None: their folders tell. allow_code: nothing is held back.
    """

    stored: bool | None = None
    allow_code: bool = False
    _files: dict[str, bool] = field(default_factory=dict)
    _rewritten: list[Node] = field(default_factory=list)

    def note(self, path: Path, chain: tuple[Path, ...]) -> None:
        """Called for each file that is read. chain: the files that include it, and last itself, their links
        followed. What a stored file includes is stored too."""
        within = any(self._files[str(other)] for other in chain[:-1])
        stored = self.stored if self.stored is not None else within or is_stored(path)
        self._files |= {str(path): stored, str(chain[-1]): stored}

    def withholds(self, node: Node) -> bool:
        """Whether a text that reads the environment is one of a stored file, and this user has not trained
        with it at that place. Else a stranger's config would write secrets into what is made of it."""
        return self.wrote(node) and not KnownCode.of_user().holds(setting_piece(node.path, node.value).digest)

    def wrote(self, node: Node) -> bool:
        """Whether a stored file says this, and nothing has allowed it."""
        return not self.allow_code and self.stored_at(node)

    def stored_at(self, node: Node) -> bool:
        """Whether a stored file says this. The command line is the user's own, whatever it lays upon."""
        file, _, line = node.where.rpartition(":")  # an override's text is in quotes: it ends in no digit
        if line.isdecimal():
            return self._files.get(file, True)
        return not node.where.startswith(("override ", "command line"))

    def read_as_known(self, remote: Node) -> Node:
        """`trust_remote_code` of a stored file, as `known`."""
        self._rewritten.append(remote)
        return remote.holding(KNOWN)

    def check_accepted(self, faults: Iterable[MMError]) -> None:
        """TrustError where a component's own `trust_remote_code` is plain true or false: nobody would check
        which files it runs."""
        places = {fault.where for fault in faults}
        if held := [node for node in self._rewritten if node.place() in places]:
            keys = ", ".join(node.path for node in held)
            raise TrustError(
                f"{keys} of a stored run lets files of a folder run, and its component does not know of"
                f" {KNOWN!r}: which of them you have trained with cannot be told",
                where=held[0].place(),
                accepted="false, for what needs no code of the folder",
                hint=ALLOW,
            )


def known_only(node: Node, sources: Sources) -> Node:
    """The tree, in which no `trust_remote_code` of a stored file runs more than what this user has trained
    with, wherever a component has that key."""
    node = node.mapped(lambda child: known_only(child, sources))
    remote = node.at(_REMOTE)
    if remote is not None and remote.value not in (False, FAILED) and sources.wrote(remote):
        return node.put(_REMOTE, sources.read_as_known(remote))
    return node


def stored_plugins(root: Node, sources: Sources) -> tuple[str, ...]:
    """The paths of `plugins.path` that a stored file writes."""
    return tuple(
        n.value for n in root.items("plugins", "path") if isinstance(n.value, str) and sources.wrote(n)
    )


def unknown_commands(root: Node, sources: Sources) -> tuple[str, ...]:
    """Programs that callbacks of a stored file would run, and this user has not trained with. Only training
    runs them, so only training refuses them."""
    items = root.items("callbacks")
    if not any(sources.wrote(leaf) for n in items for leaf in n.leaves()):
        return ()
    kinds = [(n, n.at("type")) for n in items]
    commands = [n for n, kind in kinds if kind is not None and kind.value in _COMMAND]
    words = [[str(word.value) for word in n.items("run")] for n in commands]
    return tuple(piece.name for piece in KnownCode.of_user().unknown(map(command_piece, words)))


def command_piece(words: list[str]) -> Piece:
    """The command of a callback, as the list of known code has it."""
    text = json.dumps(words)
    return Piece(f"the command {text}", digest_of(f"command {text}".encode()))


def setting_piece(path: str, text: str) -> Piece:
    """A text that reads the environment, as the list of known code has it."""
    return Piece(f"{path}: {text}", digest_of(f"setting {json.dumps([path, text])}".encode()))
