"""Counts in messages have their noun in the right number: f-strings use `mm_core.errors.plural`."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.scripts import nodes_of

ROOT = Path(__file__).resolve().parents[2]
EXCEPTIONS = {
    "mm_core/cli/training/train.py: steps": "the second term of a sum",
    "mm_core/training/verify_resume.py: steps": "the second term of a sum",
    "mm_core/plan/run_plan.py: size:>18,": "a column of sizes, aligned on the right",
    "mm_core/testing/frozen/autoencoders.py: 2 * t + 1": "three at least",
    "mm_core/tasks/conversations/dataset.py: longest": "more than a model has positions",
    "plugins/mm_internvl/mm_internvl/data/tiling.py: tiling.max_tiles": "the end of a range",
    "plugins/mm_custom_dit/mm_custom_dit/model.py: w": "a product of sizes",
    "plugins/mm_wan/mm_wan/predictor/transformer.py: ' x '.join(map(str, grid))": "a product of sizes",
}
"""`file: value` of a count before a plural noun -> why it cannot be 1, or is not a count."""
_NOUNS = (
    "batches|bytes|captions|characters|checkpoints|classes|clips|columns|components|conversations|elements|entries"
    "|epochs|errors|files|folders|frames|groups|hosts|hours|images|items|keys|layers|lines|messages|minutes|modules"
    "|nodes|numbers|parameters|pixels|plugins|processes|prompts|questions|ranks|rows|samples|seconds|shards|steps"
    "|tensors|texts|tiles|timesteps|tokens|values|videos|warnings|workers"
)
_NOUN = re.compile(rf" (?:{_NOUNS})(?![\w/])")
_LITERAL = re.compile(rf"""[}}"'] ?(?:{_NOUNS})(?![\w/])""")
"""A noun after a value or at the beginning of a literal; only files with one are parsed."""


def _known(value: ast.FormattedValue) -> bool:
    """Whether a value is a call of `plural`, a constant of the module, or a measured number (`:.3g`)."""
    last = getattr(value.value, "attr", getattr(value.value, "id", ""))
    if last.isupper():
        return True
    calls = value.value.func if isinstance(value.value, ast.Call) else None
    form = ast.unparse(value.format_spec) if value.format_spec is not None else ""
    return getattr(calls, "id", "") == "plural" or form.rstrip("'\"").endswith(tuple("efg%"))


def counts(nodes: tuple[ast.AST, ...]) -> Iterator[tuple[int, str]]:
    """(line, value) of each value in an f-string that a plural noun follows, unless `plural` writes both."""
    for node in nodes:
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for value, text in itertools.pairwise(parts):
            follows = isinstance(text, ast.Constant) and _NOUN.match(str(text.value))
            if follows and isinstance(value, ast.FormattedValue) and not _known(value):
                yield value.lineno, ast.unparse(ast.JoinedStr([value]))[3:-2]  # without f'{ and }'


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('f"{count} rows"', ["count"]),
        ('f"{len(rows):,} rows of {file}"', ["len(rows):,"]),
        ('f"after {step} " f"steps"', ["step"]),
        ("f\"{plural(count, 'row')} of {file}\"", []),
        ('f"at most {_MOST} rows, {config.MOST} rows"', []),
        ('f"within {timeout:g} seconds"', []),
        ('f"{name} makes clips; {count} rowsers; {count}rows"', []),
        ('f"{rate} samples/s"', []),
    ],
)
def test_counts_before_a_plural_noun_are_found(source: str, found: list[str]) -> None:
    assert [value for _, value in counts(tuple(ast.walk(ast.parse(source))))] == found


def test_messages_have_their_counts_from_plural() -> None:
    wrong, used = [], set()
    files = [*(ROOT / "mm_core").rglob("*.py"), *(ROOT / "plugins").glob("mm_*/mm_*/**/*.py")]
    assert len(files) > 250
    for file in files:
        path = file.relative_to(ROOT).as_posix()
        nodes = nodes_of(file) if _LITERAL.search(file.read_text(encoding="utf-8")) else ()
        for line, value in counts(nodes):
            if (key := f"{path}: {value}") in EXCEPTIONS:
                used.add(key)
            else:
                wrong.append(f"{path}:{line}: {{{value}}}: write {{plural(..., noun)}}")
    assert wrong == []
    assert used == set(EXCEPTIONS), "these are no longer there: remove them"
