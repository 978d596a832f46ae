"""The words of the project: what is never right in a message, a help text, a docstring, a page or a name."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from mm_core.errors import plural
from support.scripts import nodes_of
from support.texts import ROOT, texts

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
NOT_OUTSIDE_TESTS = {
    "say|says|said|hear|hears|heard|speak|speaks": "report, state, declare, show; receive",
    r"tell(?!\(self\))|tells|told": "report, state, show, name",
    "(is|are) (a |one )?sentences?|as (a|one) sentence|gets? sentences": "is a readable error",
    r"(hold|holds|held)(?!-)\b[^.:]{0,80}? against": "checks against, compares with",
    "(it|that|this|which|he|she) is no (?!longer|more|such)[a-z]+": "is not a",
    "wholly|befall|befalls|befell": "completely; happens to",
}
"""Patterns that are never right in sources and pages; tests may use them."""
PEOPLE = {"CODE_OF_CONDUCT.md": "what they are told", "CONTRIBUTING.md": 'do not "say", "hear" or "tell"'}
"""Files -> a text about people, or about these words, in which such patterns are right."""
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


def _regex(words: Mapping[str, str]) -> re.Pattern[str]:
    """Finds patterns of words as separate words, also over the line break of a paragraph or comment."""
    found = rf"(?<![\w.-])(?:{'|'.join(words)})(?![\w-])"
    return re.compile(found.replace(" ", r"(?:\s+(?:# )?)"), re.IGNORECASE)


WRONG, WRONG_OUTSIDE_TESTS = _regex(NEVER), _regex(NOT_OUTSIDE_TESTS)
ITSELF = Path("tests/repo/test_words.py")


def offences(text: str, wrong: re.Pattern[str] = WRONG) -> list[tuple[int, str]]:
    """(line, what stands there) of every word that is never right; words may be on two lines of prose."""
    return [(text.count("\n", 0, match.start()) + 1, match[0]) for match in wrong.finditer(text)]


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
    files = [path for path in texts() if path != ITSELF]
    assert len(files) > 400
    wrong = [
        f"{path}:{line}: {words!r}"
        for path in files
        for line, words in offences((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The log says so.", [(1, "says")]),
        ("at = file.tell()\ndef tell(self) -> int: ...", []),
        ("def tell(x): ...", [(1, "tell")]),
        ("unspoken, essays, retells, say_it, bespeak", []),
        ("It is a sentence.", [(1, "is a sentence")]),
        ("each with a sentence about it", []),
        ("It is held against\nits contract.", [(1, "held against")]),
        ("held-out loss after 300 steps against its start", []),
        ("a folder that is no model", [(1, "that is no model")]),
        ("a folder that is no longer read; there is no model", []),
    ],
)
def test_words_that_only_tests_may_use_are_found(text: str, found: list[tuple[int, str]]) -> None:
    assert offences(text, WRONG_OUTSIDE_TESTS) == found


def test_no_source_or_page_has_a_word_that_only_tests_may_use() -> None:
    files = [path for path in texts() if "tests" not in path.parts]
    assert len(files) > 400
    assert any(path.suffix == ".svg" for path in files) and Path("Makefile") in files
    wrong: list[str] = []
    for path in files:
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.name in PEOPLE:
            assert PEOPLE[path.name] in text
            text = text.replace(PEOPLE[path.name], "")
        wrong += [f"{path}:{line}: {words!r}" for line, words in offences(text, WRONG_OUTSIDE_TESTS)]
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
