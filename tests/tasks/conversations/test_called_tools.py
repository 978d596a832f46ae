"""Calls of tools under templates of thinking models, which show a turn otherwise once others follow it."""

from __future__ import annotations

import re

import pytest

from mm_core.errors import DataError
from support import conversation_sets as sets
from support.chat_models import TEMPLATES, save_chat_model

HEADS = {"qwen3": "<|im_start|>assistant\n", "qwen3_vl_thinking": "<|im_start|>assistant\n<think>\n"}
ASKED, GIVEN = {"role": "user", "content": "Where?"}, {"role": "tool", "content": "a circle"}
ANSWER = {"role": "assistant", "content": "There."}
CALL = {"function": {"name": "look", "arguments": {"at": "it"}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
THOUGHT = {"reasoning_content": "I look."}
SHOWN = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
EMPTY, THINKS, END = "<think>\n\n</think>\n\n", "<think>\nI look.\n</think>\n\n", "<|im_end|>"


@pytest.fixture(scope="module", params=HEADS)
def said(request, tmp_path_factory):
    """What the model learns of turns, each piece apart, in a template of this prompt."""
    folder = save_chat_model("qwen3_vl", tmp_path_factory.mktemp(request.param))
    template = (TEMPLATES / "qwen3_vl_thinking.jinja").read_text()
    published = f"{HEADS['qwen3_vl_thinking']!r}"
    assert template.count(published) == 1
    (folder / "chat_template.jinja").write_text(template.replace(published, f"{HEADS[request.param]!r}"))
    chat = sets.chat_of(folder, 4000)

    def learnt(*turns):
        return sets.learnt_by(chat, {"messages": [*turns]})[1]

    return request.param, learnt


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        ([ASKED, CALLS, GIVEN, ANSWER], [SHOWN, EMPTY + "There."]),
        ([ASKED, {**CALLS, **THOUGHT}, GIVEN, {**ANSWER, **THOUGHT}], [THINKS + SHOWN, THINKS + "There."]),
        ([ASKED, {**CALLS, "content": "Let me see."}, GIVEN, ANSWER],
         [f"Let me see.\n{SHOWN}", EMPTY + "There."]),
        ([ASKED, {**CALLS, "content": "See.", **THOUGHT}, GIVEN, ANSWER],
         [f"{THINKS}See.\n{SHOWN}", EMPTY + "There."]),
        ([ASKED, {**CALLS, "tool_calls": [CALL, CALL]}, GIVEN, GIVEN, ANSWER],
         [f"{SHOWN}\n{SHOWN}", EMPTY + "There."]),
        ([ASKED, CALLS], [EMPTY + SHOWN]),
        ([ASKED, {**CALLS, **THOUGHT}], [THINKS + SHOWN]),
        ([ASKED, CALLS, GIVEN, ANSWER, ASKED, CALLS, GIVEN, ANSWER],
         [SHOWN, "There.", SHOWN, EMPTY + "There."]),
    ],
    ids=["plain", "thought", "words", "both", "two calls", "last", "last thought", "two questions"],
)  # fmt: skip
def test_a_call_is_learnt_as_the_template_shows_it(said, turns, wanted):
    """From the end of the prompt, which may open a thought: the line breaks of an empty one are one token."""
    name, learnt = said
    if name == "qwen3_vl_thinking":
        wanted = [re.sub("^<think>\n\n?", "", text) for text in wanted]
    assert learnt(*turns) == "".join(text + END for text in wanted)


def test_a_call_whose_thought_is_omitted_is_read_and_not_learnt(said):
    """Before a later question; the answer beside it had no thought, and is learnt."""
    _, learnt = said
    found = learnt(ASKED, {**CALLS, **THOUGHT}, GIVEN, ANSWER, ASKED, {**ANSWER, **THOUGHT})
    assert SHOWN not in found and found.startswith(f"There.{END}") and "I look." in found


def test_special_tokens_within_a_call_are_a_bad_row(said):
    bad = {"function": {"name": "look", "arguments": {"at": END}}}
    with pytest.raises(DataError, match="which is a special token of the model"):
        said[1](ASKED, {**CALLS, "tool_calls": [bad]}, GIVEN, ANSWER)
