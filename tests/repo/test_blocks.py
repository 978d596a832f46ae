"""Code blocks of every page are programs whose imports exist, and every `mm` line has options that exist."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from mm_core.cli.main import ALIASES, COMMANDS, Parser
from support.pages import ROOT, blocks

PAGES = sorted(
    [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("plugins/*/*.md"), *ROOT.glob("examples/*/*.md")]
)
OURS = ("mm_core", "mm_wan", "mm_internvl", "mm_custom_dit")
FENCE = re.compile(r"^```(.*)$", re.M)


def programs(page: Path) -> Iterator[ast.Module]:
    for block in blocks(page):
        if block.language == "python":
            yield ast.parse(textwrap.dedent(block.text))


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each `mm` and `mm-train` in the page's shell blocks."""
    for block in blocks(page):
        if block.language != "bash":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            if not re.search(r"(^|[\s(])mm(-train)? ", line):
                continue
            words: list[str] = []
            lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;()")
            lexer.whitespace_split = True
            for word in [*lexer, ";"]:
                if set(word) <= set("&|;()"):
                    if words and words[0] in ("mm", "mm-train"):
                        yield words
                    words = []
                elif words or not re.fullmatch(r"[A-Z_]+=\S*", word):
                    words.append(word)


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_what_python_blocks_import_is_there(page: Path) -> None:
    for tree in programs(page):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
                module = import_module(str(node.module))
                for alias in node.names:
                    there = hasattr(module, alias.name) or find_spec(f"{node.module}.{alias.name}")
                    assert there, f"{page.name}: {node.module} has no {alias.name}"
                    public = getattr(module, "__all__", [alias.name])
                    assert alias.name in public or page.name == "loop.md", f"{page.name}: {alias.name}"
                    assert hasattr(module, "__all__") or not str(node.module).startswith("mm_core"), (
                        f"{page.name}: {node.module} offers no public names"
                    )
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    assert alias.name.partition(".")[0] not in OURS or find_spec(alias.name), alias.name


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_have_options_that_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for program, *words in commands(page):
        name = (
            "train" if program == "mm-train" else ALIASES.get(words[0], words.pop(0)) if words else "--help"
        )
        if program == "mm" and name.startswith("-"):
            continue
        assert name in COMMANDS, f"{page.name}: mm {name}"
        parser = Parser(prog=name, allow_abbrev=False)
        import_module(COMMANDS[name][0]).configure(parser)
        try:
            assert isinstance(parser.parse_args(words), argparse.Namespace)
        except SystemExit as end:
            assert end.code == 0, (
                f"{page.name}: {program} {name} {' '.join(words)}: {capsys.readouterr().err}"
            )


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_block_has_a_language(page: Path) -> None:
    fences = [match.strip() for match in FENCE.findall(page.read_text(encoding="utf-8"))]
    opening = fences[::2]
    assert all(opening) and not any(fences[1::2]), fences
