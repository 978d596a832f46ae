"""What a user can get wrong in conversations: each row, folder and key is named in a sentence."""

from __future__ import annotations

import json
import shutil
import tracemalloc

import pytest
import torch
from PIL import Image

from mm_core.builtin.configs.conversations import ConversationSource
from mm_core.errors import CheckpointError, ContractError, DataError
from mm_core.tasks import Conversations
from mm_core.tasks.conversations.lengths import Lengths
from support.chat_families import FAMILIES

USER, SAID = {"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}
GOOD = {"messages": [USER, SAID], "images": ["a.png"]}
SPECIAL = {
    **dict.fromkeys(FAMILIES, ("<|im_end|>", "<|image_pad|>")),
    "gemma3": ("<end_of_turn>", "<image_soft_token>"),
    "llava_onevision": ("<|im_end|>",),
    **dict.fromkeys(("smolvlm", "idefics3"), ("<end_of_utterance>", "<fake_token_around_image>")),
    "internvl": ("<|im_end|>", "<IMG_CONTEXT>"),
}


@pytest.fixture
def place(tmp_path):
    Image.new("RGB", (40, 80)).save(tmp_path / "a.png")
    return tmp_path


def dataset(folder, place, *rows, **options):
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (GOOD, *rows)))
    options = {"max_length": 2048, **options}
    return Conversations([ConversationSource(str(place / "rows.jsonl"))], str(folder), **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_of_the_model_in_a_text_are_a_bad_row(name, chat_model, place):
    for token in SPECIAL[name]:
        row = {"messages": [USER, {**SAID, "content": f"so {token} it is"}], "images": ["a.png"]}
        with pytest.raises(DataError) as fault:
            dataset(chat_model(name), place, row)[1]
        assert "rows.jsonl, line 2" in str(fault.value.where)
        assert fault.value.what == f"turn 2 contains {token!r}, which is a special token of the model"


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": [USER, SAID]}, "has placeholders for 1 image, but the row lists 0"),
        (
            {"messages": [USER, SAID], "images": ["a.png", "a.png"]},
            "placeholders for 1 image, but the row lists 2",
        ),
        ({"messages": [USER, SAID], "images": ["b.png"]}, "there is no such image"),
        ({"messages": [USER, SAID], "images": ["../a.png"]}, "leads outside the folder"),
        ({"messages": [USER], "images": ["a.png"]}, "no turn has the role assistant"),
        ({"messages": [USER, {**SAID, "weight": 0}], "images": ["a.png"]}, "no turn has the role assistant"),
        ({"messages": [USER, {**SAID, "weight": -0.5}], "images": ["a.png"]}, "`weight` of turn 2 is -0.5"),
    ],
)
def test_rows_are_refused_by_their_place_and_reason(row, sentence, chat_model, place):
    with pytest.raises(DataError, match=sentence) as fault:
        dataset(chat_model("qwen3_vl"), place, row)[1]
    assert "rows.jsonl, line 2" in str(fault.value.where) or "b.png" in str(fault.value.where)


def test_a_call_without_a_text_begins_where_the_prompt_ends(chat_model, place):
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "zoom", "arguments": {}}]}
    messages = [{"role": "user", "content": "Where?"}, called]
    tools = [{"type": "function", "function": {"name": "zoom"}}]
    found = dataset(chat_model("qwen3_vl"), place, {"messages": messages, "tools": tools})
    (read, _), (learnt, _), _ = found.rendered(1)
    assert read.endswith("<|im_start|>assistant\n") and learnt.startswith("<tool_call>")
    prompt = found.chat.processor.template.rendered([messages[0]], prompt=True, tools=tools)
    ids = found.chat.processor.tokenizer(prompt)["input_ids"]  # those that the model is asked with
    assert found[1]["pieces"][0].tokens["input_ids"].tolist()[: len(ids)] == ids


def test_a_row_that_is_cut_to_nothing_is_a_bad_row(chat_model, place):
    with pytest.raises(DataError, match="nothing to learn: the first 3 tokens contain no text") as fault:
        dataset(chat_model("qwen3_vl"), place, max_length=8)[0]
    assert "raise max_length" in fault.value.hint


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_is_never_inside_an_image(name, chat_model, place):
    """Of two images, the tokens of each that is left are as many as its features need, at any length."""
    row = {"messages": [USER, SAID, USER, SAID], "images": ["a.png", "a.png"]}
    whole = dataset(chat_model(name), place, row)[1]["pieces"][0]
    token = dataset(chat_model(name), place).chat.processor.processor.image_token_id
    alone = dataset(chat_model(name), place)[0]["pieces"][0]
    counts = [int((each.tokens["input_ids"] == token).sum()) for each in (alone, whole)]
    learnt = 0
    for most in range(8, len(whole) + 1):
        try:
            found = dataset(chat_model(name), place, row, max_length=most)[1]["pieces"][0]
        except DataError as fault:
            assert "nothing to learn" in fault.what
            continue
        learnt += 1
        assert len(found) <= most
        images = sum(
            len(each) for key, each in found.vision.items() if key in ("image_grid_thw", "image_sizes")
        )
        assert int((found.tokens["input_ids"] == token).sum()) in counts
        assert images in (0, 1, 2)
    assert learnt > 5


def test_a_template_that_shows_no_images_is_named(chat_model, place, tmp_path):
    folder = tmp_path / "blind"
    shutil.copytree(chat_model("qwen3_vl"), folder)
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template + "<|im_end|>\n{% endfor %}")
    with pytest.raises(DataError, match="the chat template outputs 0 images, but the conversation has 1"):
        dataset(folder, place)[0]
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    with pytest.raises(DataError, match="the chat template takes texts alone, but the conversation has im"):
        dataset(folder, place)[0]
    text = dataset(folder, place, {"messages": [{**USER, "content": "What?"}, SAID]})
    with pytest.raises(CheckpointError, match="the chat template renders no images, of which batches of te"):
        text.collate([{**text[1], "key": 0, "weight": 1.0}])
    (folder / "chat_template.jinja").write_text("{% if messages %}{{ raise_exception('not so') }}{% endif %}")
    with pytest.raises(DataError, match="the chat template refuses the conversation: not so"):
        dataset(folder, place)[0]
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="has no chat template"):
        dataset(folder, place)


def test_a_folder_without_the_image_processors_file_is_named(chat_model, place, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(chat_model("qwen3_vl"), folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match="the model's folder has no processor for images") as fault:
        dataset(folder, place)[0]
    assert "copy the model's preprocessor_config.json" in fault.value.hint


def test_stored_lengths_are_those_of_the_image_processors_settings(chat_model, place, tmp_path):
    folder = tmp_path / "resized"
    shutil.copytree(chat_model("qwen3_vl"), folder)
    stored, settings = str(place / "lengths.json"), folder / "preprocessor_config.json"
    before = dataset(folder, place, lengths=stored).lengths()
    wanted = json.loads(settings.read_text())
    wanted["size"] = {"shortest_edge": 64, "longest_edge": 512}
    settings.write_text(json.dumps(wanted))
    found = dataset(folder, place, lengths=stored)
    assert found.lengths().tolist() == [len(found[0]["pieces"][0])] != before.tolist()


def test_files_of_rows_are_not_read_whole_for_stored_lengths(place):
    large = place / "large.parquet"
    with large.open("wb") as file:
        file.truncate(64 * 2**20)
    stored = Lengths(place / "lengths.json", [ConversationSource(str(large))], str(place), [])
    tracemalloc.start()
    stored._keep(torch.ones(1, dtype=torch.int64))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_an_image_processor_that_needs_torchvision_says_so(chat_model, place, tmp_path):
    folder = tmp_path / "llama4"
    shutil.copytree(chat_model("qwen3_vl"), folder)
    (folder / "video_preprocessor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Llama4ImageProcessor", "processor_class": "Llama4Processor"})
    )
    with pytest.raises(CheckpointError, match="the processor cannot be opened") as fault:
        dataset(folder, place)
    assert fault.value.hint == "its image processor needs torchvision: pip install torchvision"


def test_a_task_without_a_folder_needs_a_processor(place):
    with pytest.raises(ContractError, match="the dataset has no processor, and the task has no model folder"):
        Conversations([ConversationSource(str(place / "rows.jsonl"))])
