"""Configs of stored runs: which files these are, which of their settings need the user's permission, and what
training records as permitted.

A user's own YAML may name any code, as the user's own script may. The config of a stored run or checkpoint
may come from another person: code that it names runs only if this user has trained with it, or if a flag
allows it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mm_core.config.components import walk_components
from mm_core.config.sections import RunConfig
from mm_core.errors import MMError, TrustError
from mm_core.plugin.local import imported_code
from mm_core.plugin.trust.known import ALLOW, KnownCode, Piece, digest_of
from mm_core.plugin.trust.remote_code import code_pieces
from mm_core.schema.nodes import FAILED, Node

KNOWN = "known"
"""`trust_remote_code: known`: Python files of the folder run only if this user has trained with them."""

_REMOTE = "trust_remote_code"
_DESCRIBED = ("config.json", "adapter_config.json")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def is_stored(path: Path) -> bool:
    """Whether a config file is in the folder of a stored run, of a checkpoint or of a published model, at any
    depth."""
    places = (Path(os.path.abspath(path)), path.resolve())  # noqa: PTH100 - removes `..`, keeps links
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
    # One mark alone may be another tool's file. An incomplete checkpoint has no `checksums.json`.
    checkpoint = (there("checksums.json") or there(".metadata")) and sum(map(there, marks)) > 1
    run = there("config.yaml") and (there("manifest.json") or there("metrics.jsonl"))
    return checkpoint or run or any(True for _ in (folder / "checkpoints").glob("step_*"))


@dataclass
class Sources:
    """The files that a config was read from, and which of them belong to a stored run.

    Args:
        stored: whether all files belong to a stored run; None: decided by their folders.
        allow_code: permit everything that the files name.
        rewritten: values of `trust_remote_code` that are read as `known`.
    """

    stored: bool | None = None
    allow_code: bool = False
    _files: dict[str, bool] = field(default_factory=dict)
    rewritten: list[Node] = field(default_factory=list)

    def note(self, path: Path, chain: tuple[Path, ...]) -> None:
        """Records a config file that is read. A file included by a stored run's file counts as stored too.

        Args:
            path: the file.
            chain: the files that include it, then the file itself, with links resolved.
        """
        within = any(self._files[str(other)] for other in chain[:-1])
        stored = self.stored if self.stored is not None else within or is_stored(path)
        self._files |= {str(path): stored, str(chain[-1]): stored}

    def files(self) -> Sequence[Path]:
        """The files that were noted, each once."""
        found: dict[Path, Path] = {}
        for file in map(Path, self._files):
            found.setdefault(file.resolve(), file)
        return [*found.values()]

    def withholds(self, node: Node) -> bool:
        """Whether a stored run's config must not read the environment at this value.

        True unless this user has trained with this text at this key: a config from somebody else could write
        secrets from the environment into its outputs.
        """
        return self.wrote(node) and not KnownCode.of_user().holds(setting_piece(node.path, node.value).digest)

    def wrote(self, node: Node) -> bool:
        """Whether a config value comes from a stored run's file and has not been allowed."""
        return not self.allow_code and self.stored_at(node)

    def stored_at(self, node: Node) -> bool:
        """Whether a config value comes from a stored run's file. Overrides on the command line never do."""
        file, _, line = node.where.rpartition(":")  # an override ends with a quote, never with a digit
        if line.isdecimal():
            return self._files.get(file, True)
        return not node.where.startswith(("override ", "command line"))

    def check_accepted(self, faults: Iterable[MMError]) -> None:
        """Raises TrustError if a component of a stored run's config accepts only true or false as
        `trust_remote_code`: it would run files without checking whether this user has trained with them."""
        places = {fault.where for fault in faults}
        if held := [node for node in self.rewritten if node.place() in places]:
            keys = ", ".join(node.path for node in held)
            raise TrustError(
                f"{keys} of a stored run would run Python files from the model's folder, and this component"
                " cannot check that they are the files you have trained with",
                where=held[0].place(),
                accepted="false, for a model that needs no code from its folder",
                hint=ALLOW,
            )


def known_only(node: Node, sources: Sources) -> Node:
    """A config's tree in which `trust_remote_code` of a stored run is `known`, in every component.

    Only Python files that this user has trained with can run then.
    """
    node = node.mapped(lambda child: known_only(child, sources))
    remote = node.at(_REMOTE)
    if remote is not None and remote.value not in (False, FAILED) and sources.wrote(remote):
        sources.rewritten.append(remote)
        return node.put(_REMOTE, remote.holding(KNOWN))
    return node


def stored_plugins(root: Node, sources: Sources) -> tuple[str, ...]:
    """The one-file plugins of `plugins.path` that a stored run's config names."""
    return tuple(
        n.value for n in root.items("plugins", "path") if isinstance(n.value, str) and sources.wrote(n)
    )


def unknown_commands(config: RunConfig, root: Node, sources: Sources) -> tuple[str, ...]:
    """Programs named by callbacks of a stored run's config that this user has not trained with.

    Only training runs callbacks, so only training refuses them.

    Args:
        config: the config.
        root: the tree that it was checked from.
        sources: which files belong to a stored run.
    """
    if not any(sources.wrote(leaf) for item in root.items("callbacks") for leaf in item.leaves()):
        return ()
    return tuple(piece.name for piece in KnownCode.of_user().unknown(_commands(config)))


def _commands(config: RunConfig) -> Iterator[Piece]:
    """The programs of callbacks as entries for the list of code that this user has trained with."""
    for _, component in walk_components(config):
        if component.type == "core/command":
            text = json.dumps([str(word) for word in component.options["run"]])
            yield Piece(f"the command {text}", digest_of(f"command {text}".encode()))


def setting_piece(path: str, text: str) -> Piece:
    """A config value that reads the environment, as an entry for the list of code this user trained with."""
    return Piece(f"{path}: {text}", digest_of(f"setting {json.dumps([path, text])}".encode()))


def check_commands(config: RunConfig) -> None:
    """Refuses the programs in a stored run's callbacks, unless this user has trained with them.

    Raises:
        TrustError: lists the unknown programs.
    """
    if config.unknown_commands:
        raise TrustError(
            "the stored run's callbacks would run these programs as your user, although no training of yours "
            f"has used them: {', '.join(config.unknown_commands)}",
            where="callbacks",
            accepted="callbacks=[], which runs none of them",
            hint=ALLOW,
        )


def remember(config: RunConfig) -> str | None:
    """Records the code of a training run as known, on the first rank.

    Returns a note if that fails: the run continues anyway.
    """
    try:
        fault = KnownCode.of_user().add([*_pieces(config)])
    except MMError as error:
        fault = error.what
    if fault is None:
        return None
    return f"this run's code is not recorded as known: {fault}; commands on the run will need --allow-code"


def remember_imports(config: RunConfig) -> None:
    """Records code that the run's plugins have imported since the start; `remember` has reported errors."""
    with suppress(MMError, OSError):
        KnownCode.of_user().add([*_imports(config)])


def _imports(config: RunConfig) -> Iterator[Piece]:
    return imported_code({plugin.module for plugin in config.registry.plugins})


def _pieces(config: RunConfig) -> Iterator[Piece]:
    yield from _imports(config)
    for _, component in walk_components(config):
        if component.options.get("trust_remote_code"):
            folders = (Path(v) for v in component.options.values() if isinstance(v, str | Path))
            for folder in filter(_may_hold_code, folders):
                yield from code_pieces(folder)
    yield from _commands(config)
    for path, text in config.literals.items():
        yield setting_piece(path, text)


def _may_hold_code(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "tokenizer_config.json"))
