"""Reads launch scripts of a shell: variables, arithmetic, quoted blocks of flags. Nothing of them is run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mm_core.errors import ConfigError
from mm_core.files import read_plain
from mm_core.interchange.migration.arithmetic import calculated
from mm_core.interchange.migration.scripts import Script, Unrun, Word

MOST, MOST_EXPANDED = 256 * 1024, 4_000_000
"""Most characters in a script, and in all that its variables expand to: `A=$A$A` doubles in every line."""
_PIECE = 32  # characters that a part of a word counts as, however short
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BRACED = re.compile(r"([A-Za-z_]\w*)(?:\[([@*]|\d+)\]|(:?-)(.*))?\Z", re.DOTALL)
_CHANGED = re.compile(r"(\w+)\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)|(\w+)\s*(?:\+\+|--)|(?:\+\+|--)\s*(\w+)")
_REDIRECT = re.compile(r"(?:\d+|&)?(<<<|<<-?|[<>]&|>>|>\||[<>])")
_PLAIN, _IN_SINGLE = re.compile(r"""[^\s\\;&|<>()$`'"]+"""), re.compile(r"[^'\n]+|\n")
_IN_DOUBLE = re.compile(r'[^"$`\\\n]+|\n')
_EXPORTS = frozenset({"export", "declare", "local", "readonly", "typeset"})
_MAY_SET = frozenset({"eval", "source", ".", "let", "read", "unset", "mapfile", "readarray"})
_BEFORE = frozenset({"then", "else", "elif", "do", "!", "time", "nohup", "exec"})
_BLOCKS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
_BLOCKS |= {"{": "}", "function": "}"}


@dataclass(frozen=True)
class _Piece:
    """A part of a word.

    Attributes:
        solid: whether it was quoted, so that spaces in it do not end the word.
        unknown: whether only a shell that runs the script knows what it stands for.
    """

    text: str
    line: int
    solid: bool = False
    unknown: bool = False


def read_script(path: Path) -> Script:
    """Reads a script.

    Raises:
        MMError: it cannot be read, is too long, or has a quote or bracket that is not closed.
    """
    try:
        text = read_plain(path).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"the script cannot be read: {error.strerror}", where=str(path)) from None
    if len(text) > MOST:
        raise ConfigError("the script is too long", where=str(path), accepted=f"{MOST:,} characters")
    reader = _Reader(Script(path), text.replace("\r\n", "\n"), 1, {})
    try:
        reader.read()
    except RecursionError:
        raise ConfigError("the script is nested too deeply", where=str(path)) from None
    return reader.script


class _Reader:
    """A pass over a script's text; statements are evaluated as they end."""

    def __init__(
        self, script: Script, text: str, line: int, variables: dict[str, list[list[_Piece]]]
    ) -> None:
        self.script, self.text, self.at, self.line = script, text, 0, line
        self.variables = variables  # name -> its items; one, unless it is an array
        self.words: list[list[_Piece]] = []
        self.open: list[str] = []  # what ends the blocks that are open, which are not evaluated
        self.either = False  # whether `&&` or `||` decides about this statement
        self.typed: set[str] = set()  # whose values `declare -i` and the like change
        self.documents: list[str] = []  # here-documents that begin with the next line

    def read(self) -> None:
        while self.at < len(self.text):
            char = self.text[self.at]
            redirect = _REDIRECT.match(self.text, self.at)
            if self.text.startswith("\\\n", self.at):
                self._skip(2)
            elif char in " \t":
                self._skip(1)
            elif char == "#":
                self._skip(self._end_of_line() - self.at)
            elif redirect:
                self._redirected(redirect)
            elif char in "\n;&|":
                sign = self._skip(2 if self.text.startswith(("&&", "||"), self.at) else 1)
                kept = self.either and not self.words  # `&&` at the end of a line
                self._ended()
                self.either = kept or sign in ("&&", "||")
                self._skip_documents(char)
            elif char in "()":
                self._bracket(char)
            else:
                self._word()
        self._ended()

    def _end_of_line(self) -> int:
        end = self.text.find("\n", self.at)
        return len(self.text) if end < 0 else end

    def _skip(self, count: int) -> str:
        taken = self.text[self.at : self.at + count]
        self.at, self.line = self.at + count, self.line + taken.count("\n")
        return taken

    def _note(self, text: str, why: str, line: int | None = None, sets: bool = False) -> None:
        self.script.unrun.append(Unrun(line or self.line, " ".join(text.split())[:80], why, sets))

    def _redirected(self, match: re.Match[str]) -> None:
        self._skip(len(match[0]))
        while self.text.startswith((" ", "\t", "\\\n"), self.at):
            self._skip(2 if self.text[self.at] == "\\" else 1)
        line, target = self.line, "".join(piece.text for piece in self._pieces())
        if match[1] in ("<<", "<<-"):
            self._note(f"<<{target}", "a here-document is not read", line)
            self.documents.append(target)

    def _skip_documents(self, ended: str) -> None:
        while ended == "\n" and self.documents:
            mark = self.documents.pop(0)
            end = re.compile(rf"^\t*{re.escape(mark)}$", re.MULTILINE).search(self.text, self.at)
            self._skip((end.end() if end else len(self.text)) - self.at)

    def _bracket(self, char: str) -> None:
        if char == ")":
            self._ended()
            if self.open[-1:] == [")"]:
                self.open.pop()
        elif self.text.startswith("((", self.at):
            line, text = self.line, self._balanced("(", ")")
            names = [name for found in _CHANGED.findall(text) for name in found if name]
            self._note(text, "this arithmetic is not evaluated", line, bool(names))
            self._forget(names, line)
            self.words.append([_Piece(text, line)])
            return
        elif self.words:  # the definition of a function
            self._note(_shown(self.words), "a function is not evaluated")
            self._skip(self.text.find(")", self.at) - self.at if ")" in self.text[self.at :] else 1)
            self.words = []
        else:
            self._note("(", "commands in brackets are not evaluated")
            self.open.append(")")
        self._skip(1)

    def _word(self) -> None:
        assigned = _ASSIGNED.match(self.text, self.at)
        before = _begun(self.words)
        first = _shown(before[:1])
        options = [_shown([word]) for word in before[1:] if not _is_assignment(word)]
        names = all(first in _EXPORTS and option.startswith("-") for option in options)
        if assigned and names and (not before or first in _EXPORTS or _is_assignment(before[0])):
            line = self.line
            self._skip(len(assigned[0]))
            items = self._array() if self.text.startswith("(", self.at) else [self._pieces()]
            self.words.append([_Piece(assigned[0], line), *(p for item in items for p in item)])
            if any(re.search("[^-agrx]", option) for option in options):
                self._note(_shown(_begun(self.words)), "its values are not evaluated", line, True)
                self.typed.add(assigned[1])
            if self.either or self.open or assigned[1] in self.typed:
                self._forget([assigned[1]], line)
            else:
                self._assign(assigned[1], items, bool(assigned[2]), first == "export")
        else:
            self.words.append(self._pieces())

    def _array(self) -> list[list[_Piece]]:
        line, outer = self.line, self.words
        self._skip(1)
        self.words = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at].isspace() or self.text.startswith("\\\n", self.at):
                self._skip(2 if self.text[self.at] == "\\" else 1)
            elif self.text[self.at] == "#":
                self._skip(self._end_of_line() - self.at)
            else:
                self.words.append(self._pieces())
        items, self.words = _split_all(self.words), outer
        if not self._skip(1):
            raise self._unclosed("(", line)
        return [[replace(piece, solid=True) for piece in item] for item in items]

    def _assign(self, name: str, items: list[list[_Piece]], more: bool, exported: bool) -> None:
        before = self.variables.get(name, []) if more else []
        if len(before) == len(items) == 1:
            before, items = [], [[*before[0], *items[0]]]
        self.variables[name] = [*before, *items]
        if exported:
            self.script.exports[name] = " ".join(_shown([item]) for item in self.variables[name])

    def _forget(self, names: Iterable[str], line: int) -> None:
        """Only a shell that runs the script knows the values of these variables."""
        for name in names:
            self.variables[name] = [[_Piece(f"${name}", line, True, True)]]

    def _pieces(self) -> list[_Piece]:
        """The next word, up to a space or operator outside of quotes."""
        found: list[_Piece] = []
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;&|<>()":
            char, line = self.text[self.at], self.line
            if char == "\\":
                taken = self._skip(2)
                found += [_Piece(taken[1:], line, True)] if taken != "\\\n" else []
            elif char in "'\"":
                found += self._quoted(char)
            elif char in "$`":
                found += self._expansion(False)
            else:
                found.append(self._run(_PLAIN, False))
        if self.at == start:  # an operator where a word is expected
            self._skip(1)
        return found

    def _run(self, characters: re.Pattern[str], quoted: bool) -> _Piece:
        line, run = self.line, characters.match(self.text, self.at)
        return _Piece(self._skip(len(run[0]) if run else 1), line, quoted)

    def _quoted(self, mark: str) -> Iterator[_Piece]:
        line = self.line
        self._skip(1)
        yield _Piece("", line, True)  # "" is a word
        while not self.text.startswith(mark, self.at):
            char, escaped = self.text[self.at : self.at + 1], self.text[self.at + 1 : self.at + 2]
            if not char:
                raise self._unclosed(mark, line)
            if mark == "'" or char not in "$`\\":
                yield self._run(_IN_SINGLE if mark == "'" else _IN_DOUBLE, True)
            elif char != "\\":
                yield from self._expansion(True)
            elif escaped in ("$", '"', "\\", "`", "\n"):
                yield _Piece(self._skip(2)[1].strip("\n"), self.line, True)
            else:
                yield _Piece(self._skip(1), self.line, True)
        self._skip(1)

    def _unclosed(self, mark: str, line: int) -> ConfigError:
        where, what = f"{self.script.path}:{line}", "this quote" if mark in "'\"" else f"this {mark}"
        return ConfigError(f"{what} is never closed", where=where, hint="check the script with `bash -n`")

    def _unknown(self, text: str, line: int, why: str) -> list[_Piece]:
        if not self.open:
            self._note(text, why, line)
        return [_Piece(text, line, True, True)]

    def _balanced(self, opening: str, closing: str) -> str:
        """The text from here to the bracket that closes it, both included."""
        depth, line, quote, start = 0, self.line, "", self.at
        while self.at < len(self.text):
            char = self._skip(2 if self.text[self.at] == "\\" else 1)
            if quote:
                quote = "" if char == quote else quote
            elif char in "'\"" and opening != "`":
                quote = char
            elif char == closing and (opening != closing or depth):
                depth -= 1
            elif char == opening:
                depth += 1
            if not depth and self.at > start + 1:
                return self.text[start : self.at]
        raise self._unclosed(opening, line)

    def _expansion(self, quoted: bool) -> list[_Piece]:
        line = self.line
        if self.text[self.at] == "`":
            return self._unknown(self._balanced("`", "`"), line, "commands in backticks are not run")
        self._skip(1)
        if self.text.startswith("((", self.at):
            return self._arithmetic(self._balanced("(", ")"), line)
        if self.text.startswith("(", self.at):
            return self._unknown("$" + self._balanced("(", ")"), line, "commands in $( ) are not run")
        if self.text.startswith("{", self.at):
            inner = self._balanced("{", "}")
            match = _BRACED.match(inner[1:-1])
            if match is None:
                return self._unknown("$" + inner, line, "this expansion is not evaluated")
            return self._value(match[1], "$" + inner, line, quoted, *match.groups("")[1:])
        if self.text.startswith(("'", '"'), self.at):
            return []  # $'...'
        if name := _NAME.match(self.text, self.at):
            return self._value(self._skip(len(name[0])), "$" + name[0], line, quoted)
        if self.text[self.at : self.at + 1] and self.text[self.at] in "0123456789@*#?$!-":
            return self._unknown("$" + self._skip(1), line, "an argument of the script, or its state")
        return [_Piece("$", line, quoted)]

    def _value(
        self, name: str, text: str, line: int, quoted: bool, at: str = "", sign: str = "", other: str = ""
    ) -> list[_Piece]:
        items = self.variables.get(name)
        if sign and (not items or (sign == ":-" and not _shown(items[:1]))):
            text = '"' + other.replace('"', "") + '"'
            items = [_Reader(self.script, text, line, self.variables)._pieces()]
        if items is None:
            return self._unknown(text, line, f"{name} is not set in this script")
        place = int(at) if at.isdigit() else 0
        chosen = items if at in ("@", "*") else items[place : place + 1]
        self.script.expanded += sum(len(piece.text) + _PIECE for item in chosen for piece in item)
        if self.script.expanded > MOST_EXPANDED:
            where, accepted = f"{self.script.path}:{line}", f"{MOST_EXPANDED:,} characters"
            raise ConfigError(
                "the variables of this script expand to too much", where=where, accepted=accepted
            )
        if at in ("@", "*"):
            return [piece for item in chosen for piece in (_Piece(" ", line), *item)][1:]
        return [replace(piece, solid=quoted or piece.unknown) for item in chosen for piece in item]

    def _arithmetic(self, text: str, line: int) -> list[_Piece]:
        try:
            value = calculated(text[2:-2], lambda name: _shown(self.variables[name][:1]))
            return [_Piece(str(value), line)]
        except ValueError:
            return self._unknown("$" + text, line, "this arithmetic is not evaluated")

    def _ended(self) -> None:
        """Evaluates the statement whose words were read."""
        words, self.words = _begun(self.words), []
        if not words:
            return
        first, line = _shown(words[:1]), words[0][0].line
        if self.open and first == self.open[-1]:
            self.open.pop()
        elif first in _BLOCKS:
            if not self.open:
                self._note(_shown(words), "conditions, loops and functions are not evaluated", line)
            self.open.append(_BLOCKS[first])
            reads = _shown(words[1:2]) in _MAY_SET  # while read A
            self._forget_all(words[1:2] if first in ("for", "select") else words[2:] if reads else [])
        elif first in _MAY_SET or _shown(words[:2]) == "printf -v":
            self._note(_shown(words), f"`{first}` is not run: it may set variables", line, True)
            self._forget_all(words[1:])
        elif first in _EXPORTS or all(map(_is_assignment, words)):
            if self.open:
                why = "inside a condition, loop or function, which is not evaluated"
                self._note(_shown(words), why, line, True)
            elif self.either:
                self._note(_shown(words), "the command before it decides whether it runs", line, True)
        elif not self.open:
            command = tuple(map(_word_of, _split_all(w for w in words if not _is_assignment(w))))
            self.script.commands += [command] if command else []

    def _forget_all(self, words: list[list[_Piece]]) -> None:
        self._forget((name[0] for word in words if (name := _NAME.match(_shown([word])))), self.line)


def _begun(words: list[list[_Piece]]) -> list[list[_Piece]]:
    """A statement from its command on, without `then`, `nohup` and the like."""
    while words and _shown(words[:1]) in _BEFORE:
        words = words[1:]
    return words


def _is_assignment(word: list[_Piece]) -> bool:
    return bool(word and _ASSIGNED.fullmatch(word[0].text))


def _shown(words: Sequence[Sequence[_Piece]]) -> str:
    return " ".join("".join(piece.text for piece in word) for word in words)


def _split_all(raw: Iterable[list[_Piece]]) -> list[list[_Piece]]:
    """The words that expanded words fall into: spaces from variables outside of quotes end one."""
    words: list[list[_Piece]] = []
    for pieces in raw:
        words.append([])
        for piece in pieces:
            for part in [piece.text] if piece.solid else re.split(r"(\s+)", piece.text):
                if part.isspace() and not piece.solid:
                    words.append([])
                elif part or piece.solid:
                    words[-1].append(replace(piece, text=part))
    return [word for word in words if word]


def _word_of(pieces: list[_Piece]) -> Word:
    text, unknown = "".join(piece.text for piece in pieces), any(piece.unknown for piece in pieces)
    line = next((piece.line for piece in pieces if piece.text), pieces[0].line)
    return Word(text, line, unknown)
