"""What is learnt of a conversation under templates of many kinds."""

from __future__ import annotations

import re

import pytest
from mm_internvl.testing import CHAT_TEMPLATE, make_tiny_checkpoint

from mm_core.errors import DataError
from support import conversation_rows as data
from support.conversation_sets import chat_of, learnt_by, read_by


def test_turns_that_a_template_opens_with_a_thought(tmp_path):
    """Qwen3's template puts an empty thought before the last answer only, which the model writes too."""
    folder = make_tiny_checkpoint(tmp_path)
    thought = (
        "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    )
    head = "{{ '<|im_start|>' + message['role'] + '\n' }}"
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace(head, head + thought))
    said = {"messages": [{"role": r, "content": c} for r, c in (("user", "u"), ("assistant", "a"))] * 2}
    assert learnt_by(chat_of(folder), said)[1] == "a<|im_end|><think>\n\n</think>\n\na<|im_end|>"


def learnt_of(folder, template, *turns):
    """(all that the model reads, all that it learns), as text."""
    (folder / "chat_template.jinja").write_text(template)
    said = {"messages": [{"role": role, "content": content} for role, content in turns]}
    return learnt_by(chat_of(folder), said)


def test_an_end_behind_white_space_is_learnt_with_it(tmp_path):
    folder = make_tiny_checkpoint(tmp_path)
    template = CHAT_TEMPLATE.replace("{{ '<|im_end|>", "{{ ' \n<|im_end|>")
    assert learnt_of(folder, template, ("user", "u"), ("assistant", "a"))[1] == "a \n<|im_end|>"


def test_a_template_that_shows_no_lists_is_given_text(tmp_path):
    """Qwen3's own, which stands in OpenGVLab's folders, makes nothing of a list."""
    folder = make_tiny_checkpoint(tmp_path)
    first, last = CHAT_TEMPLATE.index("{% else %}"), CHAT_TEMPLATE.index("{% endif %}{{ '<|im_end|>")
    template = CHAT_TEMPLATE[:first] + CHAT_TEMPLATE[last:]
    parts = [{"type": "text", "text": "what "}, {"type": "text", "text": "colour"}]
    read, _ = learnt_of(folder, template, ("user", parts), ("assistant", "red"))
    assert read == "<|im_start|>user\nwhat colour<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    data.draw(tmp_path)
    shown = {"role": "user", "content": [{"type": "image", "path": "a.png"}, parts[0]]}
    row = {"messages": [shown, {"role": "assistant", "content": "red"}]}
    with pytest.raises(DataError, match="takes texts alone, but the conversation has images"):
        read_by(chat_of(folder), row, [tmp_path / "a.png"])


@pytest.mark.parametrize("role", ["system", "user"])
def test_words_that_a_template_leaves_out_are_a_readable_error(tmp_path, role):
    folder = make_tiny_checkpoint(tmp_path)
    kept = f"{{% for message in messages if message['role'] != '{role}' %}}"
    template = CHAT_TEMPLATE.replace("{% for message in messages %}", kept)
    with pytest.raises(DataError, match=f"omits or rewrites turn ., a turn of the {role}"):
        learnt_of(folder, template, ("system", "the system"), ("user", "what"), ("assistant", "red"))


def test_an_answer_of_nothing_is_learnt_as_such_and_nobody_has_to_ask(tmp_path):
    folder = make_tiny_checkpoint(tmp_path)
    assert learnt_of(folder, CHAT_TEMPLATE, ("user", "u"), ("assistant", ""))[1] == "<|im_end|>"
    assert learnt_of(folder, CHAT_TEMPLATE, ("system", "s"), ("assistant", "a"))[1] == "a<|im_end|>"


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("token", ["<|endoftext|>", "<|im_end|>"])
def test_tokens_that_end_a_text_cannot_be_written(tmp_path, role, token):
    """The template does not show <|endoftext|>; it would end an answer all the same."""
    folder = make_tiny_checkpoint(tmp_path)
    said = {"user": "what", "assistant": "red"}
    said[role] += f" {token} and"
    with pytest.raises(
        DataError, match=f"turn {1 + (role == 'assistant')} contains '{re.escape(token)}', which is"
    ):
        learnt_of(folder, CHAT_TEMPLATE, *said.items())


def test_a_template_that_turns_the_order_is_a_readable_error(tmp_path):
    folder = make_tiny_checkpoint(tmp_path)
    template = CHAT_TEMPLATE.replace("in messages %}", "in messages | reverse %}", 1)
    with pytest.raises(DataError, match="changes a text of the assistant, omits it or repeats it"):
        learnt_of(folder, template, ("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"))
