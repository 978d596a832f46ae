"""Labels of conversations in which the assistant thinks, under templates that show it and that do not."""

from __future__ import annotations

import json
import re
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mm_internvl.testing import CHAT_TEMPLATE, SPECIALS, TOKENS, make_tiny_checkpoint
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from mm_core.contracts import IGNORED_LABEL
from mm_core.errors import DataError
from mm_core.tasks.conversations.rows.reading import conversation
from support import conversation_rows as data
from support import conversation_sets as sets

EMPTY = "<think>\n\n</think>\n\n"
THINKING = """
{%- macro said(content) -%}
  {%- if content is string %}{{ content }}{% else %}{% for part in content -%}
    {{- '<IMG_CONTEXT>\\n' if part.type == 'image' else part.text -}}
  {%- endfor %}{% endif -%}
{%- endmacro -%}
{%- set asked = namespace(at=messages|length) -%}
{%- for one in messages %}{% if one.role == 'user' %}{% set asked.at = loop.index0 %}{% endif %}{% endfor -%}
{%- for one in messages -%}
  {%- set content = said(one.content) -%}
  {%- set parts = content.split('</think>') if one.role == 'assistant' else [content] -%}
  {%- set thought = parts[0].split('<think>')[-1].strip('\\n') if parts|length > 1 else '' -%}
  {%- set words = parts[-1].lstrip('\\n') if parts|length > 1 else content -%}
  {{- '<|im_start|>' + one.role + '\\n' -}}
  {%- if one.role == 'assistant' and loop.index0 > asked.at and (loop.last or thought) -%}
    {{- '<think>\\n' + thought + '\\n</think>\\n\\n' + words.lstrip('\\n') -}}
  {%- else -%}
    {{- words -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
"""What Qwen3's template makes of thoughts: those before the last question are left out, and the last answer
begins with an empty one where it has none."""


def shows(change: str) -> str:
    """A template that shows of every turn what this expression makes of it."""
    texts = ("message['content']", "part['text']")
    whole = CHAT_TEMPLATE
    for text in texts:
        whole = whole.replace(f"{{{{ {text} }}}}", f"{{{{ {text}{change} }}}}")
    return whole


ASKS = "{{ '<|im_start|>assistant\\n' }}"
TEMPLATES = {
    "Qwen3": THINKING,
    "the prompt opens the thought": THINKING.replace(ASKS, "{{ '<|im_start|>assistant\\n<think>\\n' }}"),
    "the prompt forbids to think": THINKING.replace(
        ASKS, "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}"
    ),
    "everything as it is": CHAT_TEMPLATE,
    "white space taken off": shows(" | trim"),
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    made = {}
    for name, template in TEMPLATES.items():
        folder = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
        (folder / "chat_template.jinja").write_text(template)
        made[name] = sets.chat_of(folder, 100_000), AutoTokenizer.from_pretrained(folder)
    data.draw(tmp_path_factory.getbasetemp() / "thoughts")
    return made, tmp_path_factory.getbasetemp() / "thoughts" / "b.png"


WORDS = [
    *("what", " is", " colour", "assistant\n", "?", "7", "\n", "\n\n", " ", "\r\n", "\r", "\t", "\u2028"),
    *("你好", "e\u0301", "\u0301", "\u1100\u1161", "\u0344", "a\u0307\u0323", "\u0338", "😀", "{{ x }}", "<"),
]
words = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)
thoughts = st.sampled_from(
    [
        *("{a}", "{a}", "<think>\n{t}\n</think>\n\n{a}", "<think>{t}</think>{a}", "{t}</think>\n\n{a}"),
        *("\n<think>\n{t}</think> {a}", f"{EMPTY}{{a}}", "<think></think>{a}", "<think>{a}"),
    ]
)


@st.composite
def conversations(draw):
    """(roles and texts, number of images)."""
    turns = [("system", draw(words))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns += [("user", draw(st.sampled_from(["", "<image>\n"])) + draw(words))]
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
            turns += [("assistant", draw(thoughts).replace("{t}", draw(words)).replace("{a}", draw(words)))]
    return turns, sum("<image>" in text for _, text in turns)


def expected(tokenizer, turns):
    """(ids, labels): for each turn of the assistant, what the template alone makes of it as the last one, and
    what it makes of it in the whole."""
    messages = []
    for role, text in turns:
        words = text.removeprefix("<image>\n")
        parts = [{"type": "image"}] * (words != text)
        parts += [{"type": "text", "text": words}] * (words == text or bool(words))
        messages.append({"role": role, "content": parts})
    picture = f"<img>{'<IMG_CONTEXT>' * TOKENS}</img>"

    def rendered(messages, **more):
        text = tokenizer.apply_chat_template(messages, tokenize=False, **more)
        return text.replace("<IMG_CONTEXT>", picture)

    whole = rendered(messages)
    text, learnt = "", []
    for number, message in enumerate(messages):
        opening = f"<|im_start|>{message['role']}\n"
        seen = whole.split("<|im_start|>")[number + 1].removeprefix(f"{message['role']}\n")
        begin = len(in_bytes(text + opening))
        text += opening + seen
        if message["role"] != "assistant":
            continue
        asked = rendered(messages[:number], add_generation_prompt=True).rpartition(opening)[2]
        alone = rendered(messages[: number + 1]).split(opening)[-1]
        before, closed, _ = message["content"][0]["text"].partition("</think>")
        thinks = bool(closed and before.removeprefix("\n").removeprefix("<think>").strip())
        if seen != alone and thinks:
            assert "</think>" not in seen  # read, not learnt
            continue
        if seen != alone:
            assert re.sub(r"^<think>\s*</think>\n*", "", alone) == seen.lstrip("\n")
        begin += len(asked) if seen.startswith(asked) else 0
        learnt.append((begin, len(in_bytes(text.removesuffix("\n")))))
    assert text == whole
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    place, labels = 0, []
    for token in ids:
        labels.append(token if any(begin <= place < end for begin, end in learnt) else IGNORED_LABEL)
        place += len(tokenizer.convert_ids_to_tokens(token))  # of a byte-level token, a character a byte
    assert place == len(in_bytes(whole))
    return ids, labels


def in_bytes(text: str) -> bytes:
    """What tokens are made of: composed characters, special tokens left alone."""
    pieces = re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", text)
    return "".join(p if p in SPECIALS else unicodedata.normalize("NFC", p) for p in pieces).encode()


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(made=conversations(), name=st.sampled_from(list(TEMPLATES)))
def test_every_label_is_right(chats, made, name):
    turns, images = made
    (chat, tokenizer), file = chats[0][name], chats[1]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    row["images"] = ["a.png"] * images
    ids, labels = expected(tokenizer, turns)
    if all(label == IGNORED_LABEL for label in labels):
        with pytest.raises(DataError, match="omits the thoughts of all assistant turns"):
            sets.read_by(chat, row, [file] * images)
        return
    tokens = sets.read_by(chat, row, [file] * images)
    assert tokens.of("input_ids").tolist() == ids
    assert tokens.of("labels").tolist() == labels


# -- what is read, and what is not -----------------------------------------------------------------


@pytest.fixture
def said(tmp_path):
    """What a template makes of turns: (all that the model reads, all that it learns), as text."""
    folder = make_tiny_checkpoint(tmp_path / "tiny")

    def read(template, *turns):
        (folder / "chat_template.jinja").write_text(template)
        roles = ("user", "assistant") * len(turns)
        row = {"messages": [{"role": r, "content": c} for r, c in zip(roles, turns, strict=False)]}
        return sets.learnt_by(sets.chat_of(folder), row)

    return read


def test_the_last_thought_is_learnt_and_an_answer_without_its_thought_is_not(said):
    turns = ("what", "<think>\nit is a\n</think>\n\nred", "which", "blue", "in", "<think>of</think>green")
    read, learnt = said(THINKING, *turns)
    assert "<|im_start|>assistant\nred<|im_end|>" in read and "it is a" not in read
    assert learnt == "blue<|im_end|><think>\nof\n</think>\n\ngreen<|im_end|>"
    assert said(CHAT_TEMPLATE, *turns)[1] == "<|im_end|>".join([*turns[1::2], ""])


def test_an_empty_thought_is_none(said):
    plain, empty = ("what", "red", "which", "blue"), ("what", f"{EMPTY}red", "which", f"{EMPTY}blue")
    assert said(THINKING, *empty) == said(THINKING, *plain)
    assert said(THINKING, *plain)[1] == f"red<|im_end|>{EMPTY}blue<|im_end|>"


def test_a_template_without_a_prompt_learns_the_thought_too(said):
    template = CHAT_TEMPLATE.partition("{% if add_generation_prompt %}")[0]
    assert said(template, "what", "<think>a</think>red")[1] == "<think>a</think>red<|im_end|>"


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        (THINKING, "first <think>a</think>red"),
        (THINKING, "<think>a</think>red<think>b</think>blue"),
        (THINKING, "<think>a<think>b</think>red"),
        (shows(" | upper"), "red"),
        (shows("[:12]"), "<think>a</think>red"),
        (shows(" * 2"), "red"),
        (CHAT_TEMPLATE + "{% if messages[-1]['content'][0]['text'] == 'red' %}blue{% endif %}", "red"),
        (shows(".split('</think>')[0]"),
         "<think>a</think>red"),
    ],
    ids=["words before", "two thoughts", "opened twice", "rewritten", "cut", "twice", "more", "no answer"],
)  # fmt: skip
def test_words_that_a_template_takes_away_are_a_readable_error(said, template, turn):
    with pytest.raises(DataError) as fault:
        said(template, "what", turn)
    assert fault.value.what == ("the chat template changes a text of the assistant, omits it or repeats it")
    assert fault.value.hint == (
        "put a thought before its answer, between <think> and </think>; or use another template"
    )


def test_a_row_of_which_no_thought_is_shown_is_a_readable_error(said):
    """A question stands behind the only answer; or a template shows answers alone."""
    alone = shows(".split('</think>')[-1]")
    for template, turns in (
        (THINKING, ("what", "<think>a</think>red", "which")),
        (alone, ("what", "a</think>b")),
    ):
        with pytest.raises(DataError) as fault:
            said(template, *turns)
        assert fault.value.what == (
            "the chat template omits the thoughts of all assistant turns, so nothing is left to learn"
        )
        assert fault.value.hint == (
            "end the row with an answer, whose thought the template keeps; or use another template"
        )


def test_a_thought_that_a_row_keeps_apart():
    asked = {"role": "user", "content": "what"}
    for thought in ("it is", "\n it is\n", "", None):
        apart = {"role": "assistant", "content": "red", "reasoning_content": thought}
        inside = "<think>\nit is\n</think>\n\nred" if thought else "red"
        whole = {"role": "assistant", "content": inside}
        assert conversation({"messages": [asked, apart]}, "row") == conversation(
            {"messages": [asked, whole]}, "row"
        )
    for thought, sentence in (
        (["it is"], "`reasoning_content` of turn 2 is a list, not a text"),
        ("<image>", "turn 2 is the assistant's, but has an image or a video"),
        ("\ud800", "turn 2 contains half of a surrogate pair, which is not a character"),
    ):
        with pytest.raises(DataError) as fault:
            conversation({"messages": [asked, {**apart, "reasoning_content": thought}]}, "row")
        assert fault.value.what == sentence


@pytest.mark.parametrize("special", [False, True])
def test_tags_that_are_tokens_are_learnt_as_such(tmp_path, special):
    """As Qwen3's are, no special ones; or special where somebody added them so."""
    folder = make_tiny_checkpoint(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(
        [AddedToken(tag, normalized=False, special=special) for tag in ("<think>", "</think>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    if special:
        named = json.loads((folder / "tokenizer_config.json").read_text())
        named["additional_special_tokens"] += ["<think>", "</think>"]
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(THINKING)
    chat = sets.chat_of(folder)
    row = {
        "messages": [
            {"role": "user", "content": "what"},
            {"role": "assistant", "content": "<think>a</think>red"},
        ]
    }
    labels = sets.read_by(chat, row).of("labels").tolist()
    learnt = [token for token in labels if token != IGNORED_LABEL]
    said = ["<think>", "Ċ", "a", "Ċ", "</think>", "ĊĊ", "red", "<|im_end|>"]
    assert chat.processor.tokenizer.convert_ids_to_tokens(learnt) == said
