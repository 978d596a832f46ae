"""The dataset: what a sample holds, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import tracemalloc

import pytest
import torch
from mm_internvl.testing import make_tiny_checkpoint

from mm_core.builtin.configs.conversations import ConversationSource as Source
from mm_core.errors import CheckpointError, ConfigError, DataError, RunWarning
from mm_core.tasks.conversations.dataset import Conversations, _positions_of, _read
from support import conversation_sets as sets

data, dataset, loaded, place, said = sets.data, sets.dataset, sets.loaded, sets.place, sets.said


def test_a_system_prompt_is_given_to_those_that_have_none(place):
    found = dataset(place, system="a system of its own")
    assert said(found, found[0]).startswith(
        "<|im_start|>system\na system of its own<|im_end|>\n<|im_start|>user"
    )
    assert said(found, found[4]).startswith("<|im_start|>system\nthe system<|im_end|>\n<|im_start|>user")


def test_system_of_a_row_is_its_system_prompt(place):
    """As ShareGPT has it; an empty column is none."""
    turns, spoken = data.ROWS[0], {"role": "system", "content": "be brief"}
    head, behind = "<|im_start|>system\nbe brief<|im_end|>\n", "<|im_start|>user\nwhat is red?"
    both = {"messages": [spoken, _USER, _SAID], "system": " be brief\n"}
    empty = [{**turns, "system": nothing} for nothing in ("", None)]
    found = dataset(place, [{**turns, "system": "be brief"}, both, *empty], system="of the dataset")
    assert said(found, found[0]).startswith(head + behind)
    assert said(found, found[1]).startswith(head + "<|im_start|>user\nwhat?")
    for index in (2, 3):
        assert said(found, found[index]).startswith("<|im_start|>system\nof the dataset<|im_end|>\n" + behind)
    row = data.asked("what?", "red", "say <|im_end|>", "no", system="be brief")
    sizes = {"max_length": 400, "frames": 3, "max_pixels": 9999}
    fields = {"sources": found.wanted.sources, "processor": str(place / "model"), **sizes}
    inputs = Conversations.conversing(reader=None, **fields)
    questions = inputs.questions(
        data.write(place / "files" / "q.jsonl", [{**turns, "system": "be brief"}, row])
    )
    text = found.chat.processor.tokenizer.decode(questions[0]().inputs["input_ids"][0])
    assert head + behind in text
    with pytest.raises(DataError, match=r"turn 3 contains '<\|im_end\|>'"):
        questions[1]()


def test_a_long_text_is_no_warning_of_transformers(place, monkeypatch):
    """max_length cuts what is beyond the tokenizer's own length."""
    found = dataset(place, [data.asked("what?", "number " * 100)], max_length=64)
    found.chat.processor.tokenizer.model_max_length = 64
    warned = []
    logger = logging.getLogger("transformers.tokenization_utils_base")
    monkeypatch.setattr(logger, "filters", [lambda record: warned.append(record.getMessage())])
    assert len(found[0]["pieces"][0].of("input_ids")) == 64
    assert not warned
    found.chat.processor.tokenizer("number " * 100)
    assert len(warned) == 1  # the library's own calls do


def test_a_json_list_is_read_as_well(place):
    (place / "files" / "rows.json").write_text(json.dumps(data.ROWS), encoding="utf-8")
    lines, whole = dataset(place), dataset(place, "files/rows.json")
    for index in range(len(data.ROWS)):
        assert torch.equal(lines[index]["pieces"][0].of("labels"), whole[index]["pieces"][0].of("labels"))


@pytest.mark.filterwarnings("ignore:max_length 16384 of the dataset")  # the default, and a tiny model
def test_weights_determine_how_often_an_epoch_contains_a_source(place):
    data.write(place / "files" / "half.jsonl", [data.asked(f"what {n}?", str(n)) for n in range(6)])
    sources = [
        Source(str(place / "files/rows.jsonl"), weight=2),
        Source(str(place / "files/half.jsonl"), weight=0.5),
    ]
    found = Conversations(sources, str(place / "model"))
    names = [found[index]["id"] for index in range(len(found))]
    assert len(names) == 12 + 3
    assert sorted(names[:12]) == sorted([f"{place}/files/rows.jsonl, line {n}" for n in range(1, 7)] * 2)
    assert len(set(names[12:])) == 3 and all("half.jsonl" in name for name in names[12:])


# -- what is refused -----------------------------------------------------------------------------

SOURCE = {"annotations": "none.jsonl"}
TRAIN = {"type": "conversations", "processor": "none"}
_USER, _SAID = {"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (data.asked("<image>?", "red", image="gone.png"), "there is no such image"),
        (data.asked("<video>?", "red", video="gone.mp4"), "the video does not exist"),
        (data.asked("<image>?", "red"), "the conversation has placeholders for 1 image, but the row lists 0"),
        (
            data.asked("what?", "red", images=["a.png", "b.png"]),
            "the conversation has placeholders for 0 images, but the row lists 2",
        ),
        (
            data.asked("<video>?", "red", image="a.png"),
            "the conversation has placeholders for 0 images, but the row lists 1",
        ),
        ({"messages": [_USER, {"role": "bot", "content": "red"}]}, "turn 2 has the unknown role 'bot'"),
        ({"messages": [_USER]}, "no turn has the role assistant, so there is nothing to learn"),
        (
            {"messages": [_USER, {"role": "system", "content": "s"}, _SAID]},
            "a turn after the first has the role system",
        ),
        (
            {"messages": [_USER, {"role": "assistant", "content": 7}]},
            "the content of turn 2 is a number, not a text",
        ),
        ({"messages": [_USER, {"role": "assistant"}]}, "turn 2 needs both `role` and `content`"),
        ({"messages": []}, "`messages` is not a list of turns, or is empty"),
        ({"text": "what?"}, "the row has neither `conversations` nor `messages`, but text"),
        ({"messages": [_USER, _SAID], "conversations": []}, "the row has conversations and messages"),
        (["what?"], "the row is a list, not an object"),
        ('{"messages": [', 'this is not JSON: Expecting value at column 15 of `{"messages": [`'),
        (
            data.asked("what?", "<image>", image="a.png"),
            "turn 2 is the assistant's, but has an image or a video",
        ),
        (data.asked("<image>", "red", image="../a.png"), "the path '../a.png' leads outside the folder"),
        (
            data.asked("<image>", "red", image="/a.png"),
            "the path '/a.png' is absolute: rows have paths relative to the folder of their source",
        ),
        (
            data.asked("say <|im_end|>", "red"),
            "turn 1 contains '<|im_end|>', which is a special token of the model",
        ),
        (
            data.asked("what?", "<IMG_CONTEXT>"),
            "turn 2 contains '<IMG_CONTEXT>', which is a special token of the model",
        ),
        (
            json.dumps(data.asked("what \ud83d?", "red")),
            "turn 1 contains half of a surrogate pair, which is not a character",
        ),
        (
            json.dumps(data.asked("<image>", "red", image="\ud83d.png")),
            "the path '\\ud83d.png' contains half of a surrogate pair, which is not a character",
        ),
        (data.asked("<image>", "red", image="a\0.png"), "the path cannot be opened: embedded null byte"),
        (data.asked("<image>", "red", image="a" * 300), "the image cannot be opened: File name too long"),
        (data.asked("<video>", "red", video="a" * 300), "the video cannot be opened: File name too long"),
        (data.asked("<image>", "red", image=5), "5 is not a path to an image or video"),
        (data.asked("<image>", "red", image=["."]), "this is a folder, not an image"),
        (
            {**data.ROWS[0], "tools": [{"name": "search"}]},
            "the chat template omits the `tools` of the row",
        ),
        (
            {"messages": [_USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "a tool call of turn 2 names no function",
        ),
        (
            {"messages": [{"role": "system", "content": "be brief"}, _USER, _SAID], "system": "be long"},
            "`system` of the row differs from its system turn",
        ),
        ({**data.ROWS[0], "system": ["a"]}, "`system` of the row is a list, not a text"),
        (
            {**data.ROWS[0], "system": "say <|im_end|>"},
            "`system` of the row contains '<|im_end|>', which is a special token of the model",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "sound"}]}, _SAID]},
            "turn 1 has a part of unknown type",
        ),
    ],
)
def test_a_bad_row_is_one_error(place, row, what):
    with pytest.raises(DataError) as fault:
        dataset(place, [data.ROWS[0], row])[1]
    assert fault.value.what == what


def test_files_that_are_no_files_are_bad_rows(place):
    """A pipe would be waited for; a loop of links is refused by the system."""
    files = place / "files"
    os.mkfifo(files / "pipe.png")
    (files / "loop.png").symlink_to("loop.png")
    rows = [
        data.asked("<image>", "red", image="pipe.png"),
        data.asked("<video>", "red", video="pipe.png"),
        data.asked("<image>", "red", image="loop.png"),
    ]
    found = dataset(place, [data.ROWS[0], *rows])
    sentences = (
        "a named pipe, not an image",
        "a named pipe, not a video",
        "Too many levels of symbolic links",
    )
    for index, sentence in enumerate(sentences, 1):
        with pytest.raises(DataError, match=sentence):
            found[index]
    assert (found.lengths() > 0).all(), "measured as bad rows too"


def test_what_no_parser_takes_is_a_bad_row(place):
    """A number of more digits than Python reads, and lists in lists that pickle does not follow."""
    deep = {**data.ROWS[0], "more": json.loads("[" * 400 + "]" * 400)}
    found = dataset(place, ['{"conversations": %s}' % ("9" * 5000), data.ROWS[0], deep])
    assert said(found, found[1]).endswith("a colour<|im_end|>\n")
    for index, what in ((0, "a whole number has too many digits"), (2, "the JSON is nested too deeply")):
        with pytest.raises(DataError) as fault:
            found[index]
        assert fault.value.what == what and fault.value.where == f"{place}/files/own.jsonl:{index + 1}"


def test_rows_that_wait_for_their_packing_are_not_all_in_memory(place):
    """The peak of opening a file is near what is kept of it (tensors are not traced, their bytes are)."""
    data.write(place / "files" / "many.jsonl", [data.asked("what?", "word " * 400)] * 4000)
    sources = (Source(str(place / "files/many.jsonl")),)
    tracemalloc.start()
    rows, order = _read(sources)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    kept = len(rows._bytes)
    assert len(rows) == len(order) == 4000
    assert peak < 1.3 * kept


def test_a_weight_has_bounds(tmp_path):
    for weight in (float("inf"), 1.0e12, float("nan"), 0.0):
        with pytest.raises(ConfigError) as fault:
            sets.config_of(
                tmp_path, tmp_path, data={"train": {**TRAIN, "sources": [{**SOURCE, "weight": weight}]}}
            )
        said = str(fault.value)
        assert "weight" in said and "> 0 and <= 1000" in said and "Traceback" not in said, weight


def test_an_image_bomb_is_a_bad_row(place):
    row = data.asked("<image>?", "red", image="a.png")
    with pytest.raises(DataError, match="an image of 60 x 100 exceeds max_pixels"):
        dataset(place, [row], max_pixels=5999)[0]


def test_files_without_conversations(place):
    with pytest.raises(DataError, match="the file of conversations does not exist"):
        dataset(place, "files/gone.jsonl")
    with pytest.raises(
        DataError,
        match="none of 2 conversations can be used; error of the first: turn 1 has the unknown role 'x'",
    ):
        dataset(place, [{"messages": [{"role": "x", "content": ""}]}] * 2)
    with pytest.raises(
        DataError, match="none of 1 conversation can be read; error of the first: there is no such image"
    ):
        dataset(place, [data.asked("<image>", "red", image="gone.png")], packing=True)


def test_a_tokenizer_without_a_chat_template(place, tmp_path):
    folder = make_tiny_checkpoint(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError) as fault:
        Conversations((Source(str(place / "files/rows.jsonl")),), str(folder))
    assert str(fault.value) == (
        f"{folder}: the tokenizer has no chat template\n"
        "  accepted: chat_template.jinja, or `chat_template` in tokenizer_config.json\n"
        "  hint: use the folder of a model trained for conversations, or copy its chat template"
    )


@pytest.mark.filterwarnings("ignore:max_length 16384 of the dataset")  # the default, and a tiny model
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            ("{{ part['text'] }}", "{{ part['text'][:3] }}"),
            "the chat template changes a text of the assistant",
        ),
        (
            ("{{ '<IMG_CONTEXT>\n' }}", ""),
            "the chat template outputs 0 images, but the conversation has 1",
        ),
        (
            ("{% for message", "{{ raise_exception('no') }}{% for message"),
            "the chat template refuses the conversation: no",
        ),
    ],
)
def test_templates_that_will_not_do(place, tmp_path, change, what):
    folder = make_tiny_checkpoint(tmp_path)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace(*change))
    found = Conversations((Source(str(place / "files/rows.jsonl")),), str(folder))
    with pytest.raises(DataError, match=what):
        found[4 if "image" in what else 0]


# -- what a sentence is about ----------------------------------------------------------------------


def test_turns_have_the_numbers_of_the_row_whatever_the_datasets_system(place):
    bad = data.asked("what?", "red", "say <|im_end|>", "no")
    for system in (None, "a system"):
        with pytest.raises(
            DataError, match=r"turn 3 contains '<\|im_end\|>', which is a special token of the mod"
        ):
            dataset(place, [data.ROWS[0], bad], system=system)[1]
    with pytest.raises(DataError) as fault:
        dataset(place, system="<|im_start|>")[0]
    assert fault.value.what == (
        "`system` of the dataset contains '<|im_start|>', which is a special token of the model"
    )


def test_a_text_may_not_write_the_tokens_of_images(place):
    with pytest.raises(DataError) as fault:
        dataset(place, [data.ROWS[0], data.asked("what is <img> in HTML?", "an image")])[1]
    assert fault.value.what == "turn 1 contains '<img>', which is a special token of the model"
    assert fault.value.hint == "write <image> where an image belongs, and spell the token's name differently"


def test_a_link_may_not_lead_out_of_the_folder(place, tmp_path):
    data.draw(tmp_path / "outside")
    out, within = place / "files" / "out.png", place / "files" / "within.png"
    out.symlink_to(tmp_path / "outside" / "a.png")
    within.symlink_to(place / "files" / "a.png")
    rows = [data.asked("<image>?", "red", image=name) for name in ("within.png", "out.png")]
    found = dataset(place, rows)
    assert len(sets.pixels_of(found[0]))
    with pytest.raises(DataError) as fault:
        found[1]
    assert fault.value.what == "the path leaves its folder through a symbolic link"
    assert fault.value.hint == "copy the files into the folder, or name the real folder of the files"


def test_more_tokens_than_the_model_has_positions_are_a_warning(place, recwarn):
    with pytest.warns(
        RunWarning, match="max_length 2049 of the dataset exceeds the 2048 positions that the model"
    ):
        dataset(place, max_length=2049)
    recwarn.clear()
    dataset(place, max_length=2048)
    dataset(place, max_length=4096, packing=True)  # positions begin anew with each conversation
    assert not [warning for warning in recwarn if warning.category is RunWarning]
    long = data.asked("what?", "number " * 2100)
    with pytest.warns(
        RunWarning, match=r"conversations of 2\d\d\d tokens exceed the 2048 positions that the model"
    ):
        dataset(place, [*data.ROWS, long], max_length=4096, packing=True)


@pytest.mark.parametrize(
    ("text", "reach"),
    [
        ({}, None),
        ({"max_position_embeddings": 40960}, 40960),
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 163840),
        (
            {
                "max_position_embeddings": 40960,
                "rope_parameters": {"factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
    ],
)
def test_positions_are_those_of_the_language_model_stretched_by_its_config(text, reach):
    for name in ("text_config", "llm_config"):
        assert _positions_of({name: text}) == reach
