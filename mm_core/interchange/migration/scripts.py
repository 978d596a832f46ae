"""Launch scripts of a shell, read: their commands, with the line of every word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mm_core.config.yaml_nodes import read_plain
from mm_core.schema.nodes import Node, from_python

_LAUNCHERS = frozenset({"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"})
_LAUNCHERS |= {"deepspeed", "deepspeed.launcher.runner"}
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")


@dataclass(frozen=True)
class Word:
    """A word of a command, after expansion; `line` is where its text was written."""

    text: str
    line: int
    unknown: bool = False


@dataclass(frozen=True)
class Unrun:
    """A part of a script that only running it could evaluate; `sets`: it may set variables."""

    line: int
    text: str
    why: str
    sets: bool = False


@dataclass
class Script:
    """What a script holds, without being run.

    Attributes:
        path: its file.
        commands: every simple command outside of conditions, loops and functions, expanded.
        exports: variables of the environment that it sets, in order.
        unrun: what was not evaluated.
        expanded: characters that variables have expanded to.
    """

    path: Path
    commands: list[tuple[Word, ...]] = field(default_factory=list)
    exports: dict[str, str] = field(default_factory=dict)
    unrun: list[Unrun] = field(default_factory=list)
    expanded: int = 0

    def programs(self) -> list[Program]:
        """The programs of Python that it starts, directly or by a launcher."""
        found = []
        for words in self.commands:
            texts = [word.text for word in words]
            modules = [i for i, before in enumerate(texts[:-1], 1) if before == "-m"]
            start = max((i + 1 for i in modules if texts[i] in _LAUNCHERS), default=0)
            named = [i for i in range(start, len(texts)) if i in modules or texts[i].endswith(".py")]
            if named:
                after = words[named[0] + 1 :]
                flag = next((i for i, word in enumerate(after) if _FLAG.match(word.text)), len(after))
                launcher = self.flags(words[start : named[0] - (named[0] in modules)])
                found.append(Program(words[named[0]], launcher, after[:flag], self.flags(after[flag:])))
        return found

    def flags(self, words: Sequence[Word]) -> Node:
        """The flags in the words of a command, as a mapping of `--name` to its value: true, one or a list.

        The value of a flag that only a shell knows is marked `loose`.
        """
        found: dict[str, Node] = {}
        current, start, values = "", 0, list[Word]()
        for word in [*words, Word("--end", 0)]:
            if not _FLAG.match(word.text):
                values.append(word)
                continue
            if current:
                plain = [_number_or_text(each.text) for each in values]
                value = plain if len(plain) > 1 else plain[0] if plain else True
                loose = any(each.unknown for each in values)
                where = f"{self.path}:{start}"
                found[current] = from_python(value, where, current, loose)
            current, equals, rest = word.text.partition("=")
            values, start = [replace(word, text=rest)] if equals else [], word.line
        return Node(found, str(self.path), "")


@dataclass(frozen=True)
class Program:
    """A program of Python that a script starts.

    Attributes:
        name: its file or module.
        launcher: flags before it, of torchrun or the like.
        arguments: words after it that belong to no flag.
        flags: its own.
    """

    name: Word
    launcher: Node
    arguments: Sequence[Word]
    flags: Node


def _number_or_text(text: str) -> float | int | str:
    value = read_plain(text)
    return value if type(value) in (int, float) else text
