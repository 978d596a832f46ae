"""The words of the project: what is never right in a message, a help text, a docstring, a page or a name."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from mm_core.errors import plural
from support.scripts import nodes_of

ROOT = Path(__file__).resolve().parents[2]
NEVER = {
    "can not": "cannot",
    "hurry": "fast",
    "misfits?": "mismatch",
    "heed(s|ed|ing)?": "react to",
    "mend(s|ed|ing)?": "fix",
    "weighs? nothing": "has weight 0",
    "laid upon": "overrides",
    "name of the meeting": "rendezvous id",
    "furthest behind, in": "furthest behind, loading",
    "other metrics than": "different metrics from",
    "is not fully said": "is incomplete",
    "has nothing to do": "there is nothing to",
    "if that host cannot tell": "if it cannot be detected",
    "tensors alike but for": "numbered siblings",
    "that the run belongs to": "W&B project name",
    "said nothing": "without an error message",
    "no further account": "no details",
    "as its files hold": "once files are present",
    "is heard|be heard|are heard": "received",
    "waits at .* until all of": "waiting for",
    "put aside": "quarantined",
}
"""A pattern of words -> what to write in their place."""
NAMES = {
    "_misfit",
    "misfit",
    "taking_over",
    "take_over",
    "staging",
    "beginning",
    "milestones",
    "RunMilestones",
    "LATER",
    "observers",
    "low_bit",
    "hurry",
    "_speakers",
    "torn_steps",
    "put_aside",
    "covered",
    "_hold_alike",
    "_round_base",
    "_lower",
    "HeldBackLogits",
    "hold_back",
    "InputNames",
    "Heard",
    "led",
    "Speaker",
    "Drawn",
    "Stopped",
    "Abandoned",
    "StopAsked",
    "heeding",
    "Chosen",
    "_Lone",
    "WarmStart",
    "RunSource",
    "Elsewhere",
    "BaseWeights",
    "ways_to_read",
    "best_way",
    "no_way",
    "unlike",
    "untied",
    "resting",
    "Resting",
    "placing",
    "hold_frozen",
    "round_frozen",
    "passed_over",
    "asking",
    "Asking",
    "Said",
    "say",
    "told",
    "has_told",
    "tell_waiting",
    "heard",
    "reach",
    "look",
    "looked",
    "binned",
    "origins",
    "origins_of",
    "apart",
    "lay",
    "FromFiles",
    "Resumed",
    "Stored",
    "measuring",
}
"""Names that have a plainer one: of functions, classes, arguments and modules of the core and its plugins."""
WRONG = re.compile(
    rf"(?<![\w-])(?:{'|'.join(NEVER)})(?![\w-])".replace(" ", r"(?:\s+(?:# )?)"), re.IGNORECASE
)
ITSELF = {Path("tests/repo/test_words.py")}


def texts() -> list[Path]:
    """Every file of the repository that somebody reads as text, but for this list."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [Path(name) for name in listed.stdout.split("\0")[:-1]]
    kinds = {".py", ".md", ".yaml", ".yml", ".toml", ".js", ".html", ".cff"}
    kept = [path for path in files if path.suffix in kinds and not (ROOT / path).is_symlink()]
    return [path for path in kept if path not in ITSELF and (ROOT / path).is_file()]


def offences(text: str) -> list[tuple[int, str]]:
    """(line, what stands there) of every word that is never right; words may be on two lines of prose."""
    return [(text.count("\n", 0, match.start()) + 1, match[0]) for match in WRONG.finditer(text)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It cannot be read.", []),
        ("It can not be read.", [(1, "can not")]),
        ("# it can\n# not be read", [(1, "can\n# not")]),
        ("amended, recommend", []),
        ('"""Mends it."""', [(1, "Mends")]),
    ],
)
def test_words_that_are_never_right_are_found(text: str, found: list[tuple[int, str]]) -> None:
    assert offences(text) == found


def test_no_text_holds_a_word_that_is_never_right() -> None:
    files = texts()
    assert len(files) > 400
    wrong = [
        f"{path}:{line}: {words!r}"
        for path in files
        for line, words in offences((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_name_is_one_of_those_that_have_a_plainer_one() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    rooms = [path for path in texts() if path.suffix == ".py" and path.parts[0] in ("mm_core", "plugins")]
    wrong = set()
    for path in rooms:
        if "tests" not in path.parts:
            nodes = nodes_of(ROOT / path)
            names = {node.name for node in nodes if isinstance(node, kinds)}
            names |= {node.arg for node in nodes if isinstance(node, ast.arg)} | {path.stem}
            wrong |= {f"{path}: {name}" for name in names & NAMES}
    assert wrong == set()


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "rank", "0 ranks"),
        (1, "rank", "1 rank"),
        (2, "rank", "2 ranks"),
        (1, "entry", "1 entry"),
        (3, "entry", "3 entries"),
        (3, "key", "3 keys"),
    ],
)
def test_a_count_has_its_noun_in_the_right_number(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text
