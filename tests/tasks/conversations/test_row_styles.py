"""Rows in the styles of OpenAI, ShareGPT and ms-swift, with tools: what the model reads and learns."""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mm_internvl.testing import CHAT_TEMPLATE, make_tiny_checkpoint
from PIL import Image

from mm_core.builtin.configs.conversations import ConversationSource
from mm_core.errors import DataError
from mm_core.tasks import Conversations
from mm_core.tasks.conversations.rows import data_urls
from mm_core.tasks.conversations.rows.reading import conversation
from support import conversation_rows as data
from support import conversation_sets as sets

dataset, place = sets.dataset, sets.place

TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\ntools: ' }}"
    "{% for tool in tools %}{{ tool['function']['name'] + ' ' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
)
CALLS = (
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<call>' + call['function']['name'] + ' ' + (call['function']['arguments'] | tojson) + '</call>' }}"
    "{% endfor %}"
)
WITH_TOOLS = TOOLS + CHAT_TEMPLATE.replace(
    "{{ '<|im_end|>\n' }}{% endfor %}", CALLS + "{{ '<|im_end|>\n' }}{% endfor %}"
)
"""ChatML that lists the tools first and ends the assistant's turn with its calls."""

ASKED, ANSWER = {"role": "user", "content": "what"}, {"role": "assistant", "content": "red"}
CALL = {"name": "look", "arguments": {"at": "it"}}
CALLED = '<call>look {"at": "it"}</call>'
TURN = "<|im_start|>{}\n{}<|im_end|>\n"
OPENAI = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}
    ],
}
WHOLE = "".join(
    TURN.format(*turn)
    for turn in (("user", "what"), ("assistant", CALLED), ("tool", "a circle"), ("assistant", "red"))
)
LEARNT = f"{CALLED}<|im_end|>red<|im_end|>"
STYLES = {
    "OpenAI": {
        "messages": [ASKED, OPENAI, {"role": "tool", "content": "a circle", "tool_call_id": "1"}, ANSWER]
    },
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "what"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "a circle"},
            {"from": "gpt", "value": "red"},
        ]
    },
    "ms-swift": {
        "messages": [
            ASKED,
            {"role": "tool_call", "content": json.dumps(CALL)},
            {"role": "tool_response", "content": "a circle"},
            ANSWER,
        ]
    },
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("tools"))
    (folder / "chat_template.jinja").write_text(WITH_TOOLS)
    return sets.chat_of(folder)


@pytest.mark.parametrize("style", STYLES)
def test_a_call_of_a_tool_is_learnt_up_to_its_end_and_the_tools_answer_is_not(chat, style):
    assert sets.learnt_by(chat, STYLES[style]) == (WHOLE, LEARNT)


@pytest.mark.parametrize("given", [[{"name": "look"}], [{"type": "function", "function": {"name": "look"}}]])
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_row_are_declared_by_the_template(chat, given, as_text):
    row = {**STYLES["OpenAI"], "tools": json.dumps(given) if as_text else given}
    assert sets.learnt_by(chat, row) == (TURN.format("system", "tools: look ") + WHOLE, LEARNT)


def test_a_text_and_a_call_in_one_turn_are_both_learnt(chat):
    row = {"messages": [ASKED, {**OPENAI, "content": "a number "}]}
    assert sets.learnt_by(chat, row)[1] == f"a number {CALLED}<|im_end|>"


def test_an_image_in_the_answer_of_a_tool_is_shown(chat, tmp_path):
    data.draw(tmp_path)
    image = {"role": "tool", "content": [{"type": "image", "path": "b.png"}, {"type": "text", "text": "it"}]}
    found = sets.read_by(chat, {"messages": [ASKED, OPENAI, image, ANSWER]}, [tmp_path / "b.png"])
    assert len(found.blocks) == 1


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({**STYLES["ShareGPT"], "tools": [{"name": "look"}]}, "omits the tool calls of turn 2"),
        ({"messages": [ASKED, ANSWER], "tools": [{"name": "look"}]}, "omits the `tools` of the row"),
    ],
)
def test_what_a_template_does_not_show_of_tools_is_a_bad_row(place, row, what):
    with pytest.raises(DataError, match=what.replace("omits", "omits(?: or rewrites)?")):
        dataset(place, [data.ROWS[0], row])[1]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (
            {"messages": [ASKED, {**OPENAI, "role": "user"}, ANSWER]},
            "turn 2 calls a tool, but is of the role user",
        ),
        (
            {"messages": [ASKED, {"role": "tool_call", "content": "{"}, ANSWER]},
            "tool call of turn 2 is not JSON",
        ),
        (
            {"messages": [ASKED, {"role": "tool_call", "content": '"look"'}]},
            "a tool call of turn 2 names no function",
        ),
        (
            {"messages": [ASKED, {"role": "tool_call", "content": '{"name": "look", "arguments": [1]}'}]},
            "the arguments of a tool call of turn 2 are a list, not an object",
        ),
        ({"messages": [ASKED, ANSWER], "tools": "look"}, "`tools` of the row is not JSON"),
        (
            {"messages": [ASKED, ANSWER], "tools": {"name": "look"}},
            "`tools` of the row is no list of objects",
        ),
        ({"messages": [ASKED, {**ANSWER, "weight": -0.5}]}, "`weight` of turn 2 is -0.5"),
        ({"messages": [ASKED, {**ANSWER, "weight": "2"}]}, "`weight` of turn 2 is '2'"),
        ({"messages": [ASKED, {**ANSWER, "loss_scale": float("nan")}]}, "`loss_scale` of turn 2 is nan"),
        (
            {"messages": [ASKED, {**ANSWER, "loss": 0}]},
            "no turn has the role assistant, so there is nothing to learn",
        ),
        ({"query": "what", "response": "red", "history": [["a"]]}, "`history` is no list of"),
        ({"query": "what"}, "nothing to learn"),
    ],
)
def test_a_bad_row_is_one_error(row, what):
    with pytest.raises(DataError, match=what):
        conversation(row, "row")


@pytest.mark.parametrize("key", ["weight", "loss", "train"])
@pytest.mark.parametrize("value", [0, False])
def test_a_turn_of_weight_0_is_read_and_not_learnt(chat, key, value):
    turns = [ASKED, {**ANSWER, key: value}, ASKED, {"role": "assistant", "content": "blue", key: 1}]
    read, learnt = sets.learnt_by(chat, {"messages": turns})
    assert "red" in read and learnt == "blue<|im_end|>"
    called = [ASKED, {**OPENAI, key: value}, {"role": "tool", "content": "a"}, ANSWER]
    assert sets.learnt_by(chat, {"messages": called})[1] == "red<|im_end|>"


def test_a_query_follows_its_history():
    row = {"query": "which?", "response": "blue", "history": [["what?", "red"]], "system": "be brief"}
    found = conversation(row, "row").turns
    assert [(turn.role, turn.content) for turn in found] == [
        ("system", "be brief"),
        ("user", "what?"),
        ("assistant", "red"),
        ("user", "which?"),
        ("assistant", "blue"),
    ]
    asked = conversation({"query": "which?"}, "row", learnt=False)
    assert [turn.role for turn in asked.turns] == ["user"]


def test_fields_of_other_styles_may_be_null():
    row = {"messages": [ASKED, ANSWER], **dict.fromkeys(("conversations", "query", "answers", "images"))}
    assert [turn.role for turn in conversation(row, "row").turns] == ["user", "assistant"]
    with pytest.raises(DataError, match="`messages` is not a list of turns"):
        conversation({"messages": None}, "row")


# -- Parquet ---------------------------------------------------------------------------------------


def png(shade: int) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (40, 40), (shade, 0, 0)).save(held, "png")
    return held.getvalue()


@pytest.mark.parametrize("bare", [False, True])
def test_images_of_a_parquet_column_are_those_of_files(place, bare):
    files = place / "files"
    column = [[png(n) if bare else {"bytes": png(n), "path": None}] for n in range(6)]
    turns = [[{"role": "user", "content": f"<image>what {n}?"}, ANSWER] for n in range(6)]
    pq.write_table(pa.table({"messages": turns, "images": column}), files / "rows.parquet", row_group_size=2)
    rows = []
    for number, said in enumerate(turns):
        (files / f"shade_{number}.png").write_bytes(png(number))
        rows.append({"messages": said, "images": [f"shade_{number}.png"]})
    held, read = dataset(place, "files/rows.parquet"), dataset(place, rows)
    assert b"PNG" not in held.rows._bytes.numpy().tobytes(), "the rows in memory hold no image"
    assert held.lengths().equal(read.lengths())
    for number in (5, 0, 3, 1, 4, 2):
        assert torch.equal(sets.pixels_of(held[number]), sets.pixels_of(read[number]))
        assert held[number]["pieces"][0].of("labels").equal(read[number]["pieces"][0].of("labels"))


def test_null_columns_of_parquet_are_none(place):
    """A union of rows with and without images and tools has nulls where a row has none."""
    table = pa.table(
        {
            "messages": [[ASKED, ANSWER], [{"role": "user", "content": "<image>what"}, ANSWER]],
            "images": [None, ["b.png"]],
            "tools": pa.array([None, None], pa.string()),
            "system": pa.array([None, None], pa.string()),
        }
    )
    pq.write_table(table, place / "files" / "nulls.parquet")
    found = Conversations(
        [ConversationSource(str(place / "files/nulls.parquet"))], str(place / "model"), max_length=400
    )
    assert [bool(found[n]["pieces"][0].vision) for n in range(2)] == [False, True]


def test_a_parquet_file_that_changed_since_is_a_bad_row(place):
    file = place / "files" / "gone.parquet"
    turns = [[{"role": "user", "content": "<image>what"}, ANSWER]]
    pq.write_table(pa.table({"messages": turns, "image": [{"bytes": png(0), "path": "a.png"}]}), file)
    found = dataset(place, "files/gone.parquet")
    assert found[0]["pieces"][0].vision
    data_urls._column.cache_clear()
    file.unlink()
    with pytest.raises(DataError, match="`image` of the row cannot be read again"):
        found[0]
