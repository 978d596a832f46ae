"""Transformers reads, trains and asks each tiny vision-language model of the tests."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from support.chat_families import FAMILIES
from support.chat_models import save_chat_model
from support.chat_rows import library_inputs, library_processor, make_chat_rows, messages_of
from support.chat_tokenizers import QWEN2, published_tokenizer

LAYOUT = {"config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json"}
LAYOUT |= {"tokenizer.json", "tokenizer_config.json"}
HEADS = {
    "qwen2_5_vl": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_",
    "qwen3_vl": "<|im_start|>user\n<|vision_start|><|image_pad|>",
    "qwen3_vl_moe": "<|im_start|>user\n<|vision_start|><|image_pad|>",
    "gemma3": "<bos><start_of_turn>user\n\n\n<start_of_image><image_soft_token>",
    "llava_onevision": "<|im_start|>user <image><image>",
    "smolvlm": "<|im_start|>User:<fake_token_around_image><row_1_col_1><image>",
    "idefics3": "<|begin_of_text|>User:<fake_token_around_image><row_1_col_1><image>",
    "internvl": "<|im_start|>user\n<img><IMG_CONTEXT>",
    "qwen3_5": "<|im_start|>user\n<|vision_start|><|image_pad|>",
}
TAILS = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl"), "<|im_start|>assistant\n"),
    **dict.fromkeys(("smolvlm", "idefics3"), "<end_of_utterance>\nAssistant:"),
    "gemma3": "<start_of_turn>model\n",
    "llava_onevision": "<|im_start|>assistant\n",
    "qwen3_5": "<|im_start|>assistant\n<think>\n",
}
TURN = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}


def conversations(file):
    return [messages_of(json.loads(line), file.parent) for line in file.read_text().splitlines()]


def pictures(messages):
    return sum(part["type"] == "image" for turn in messages for part in turn["content"])


@pytest.fixture(params=FAMILIES)
def opened(request, chat_model):
    from transformers import AutoModelForImageTextToText

    folder = chat_model(request.param)
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return request.param, model, library_processor(folder)


def token_of(model):
    return getattr(model.config, "image_token_id", None) or model.config.image_token_index


def features(model, inputs):
    """How many features the tower gives for the pictures of a row."""
    vision = {key: value for key, value in inputs.items() if "pixel" in key or "image" in key}
    found = model.model.get_image_features(**vision)
    found = getattr(found, "pooler_output", found)
    whole = [found] if isinstance(found, torch.Tensor) else found
    return sum(each.flatten(0, -2).shape[0] for each in whole)


def test_the_files_are_those_of_the_published_folder(chat_model):
    for name in FAMILIES:
        folder = chat_model(name)
        files = {file.name for file in folder.iterdir()}
        templates = {"chat_template.json", "chat_template.jinja"} & files
        assert files >= LAYOUT and len(templates) == 1
        assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000


@pytest.mark.slow
def test_a_model_learns_and_answers(opened, chat_rows):
    _, model, processor = opened
    messages = next(each for each in conversations(chat_rows) if pictures(each) == 1)
    inputs = library_inputs(processor, messages)
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    assert torch.isfinite(loss)
    tower = [parameter.grad for path, parameter in model.named_parameters() if "vis" in path]
    assert any(grad is not None and grad.abs().sum() > 0 for grad in tower)
    asked = library_inputs(processor, messages[:-1], add_generation_prompt=True)
    answer = model.generate(**asked, max_new_tokens=3, do_sample=False)
    assert asked["input_ids"].shape[1] < answer.shape[1] <= asked["input_ids"].shape[1] + 3


@pytest.mark.slow
def test_image_tokens_are_as_many_as_features(opened, chat_rows):
    name, model, processor = opened
    counts = set()
    for messages in conversations(chat_rows)[::3]:
        inputs = library_inputs(processor, messages)
        tokens = int((inputs["input_ids"] == token_of(model)).sum())
        with torch.no_grad():
            assert tokens == (features(model, inputs) if pictures(messages) else 0), messages
        counts.add(tokens)
    assert len(counts) >= (3 if name == "gemma3" else 4)


def test_templates_render_the_published_heads(opened):
    from transformers import ProcessorMixin

    name, _, processor = opened
    text = ProcessorMixin.apply_chat_template(processor, [TURN], add_generation_prompt=True)
    assert text.endswith(TAILS[name])
    inputs = library_inputs(processor, [{**TURN, "content": [*picture(), *TURN["content"][1:]]}])
    assert processor.tokenizer.decode(inputs["input_ids"][0]).startswith(HEADS[name])


def picture():
    from PIL import Image

    return [{"type": "image", "image": Image.new("RGB", (40, 24), "red")}]


def test_the_prompt_of_llava_onevision_is_not_the_start_of_its_rows(chat_model):
    processor = library_processor(chat_model("llava_onevision"))
    answered = [TURN, {"role": "assistant", "content": [{"type": "text", "text": "Red."}]}]
    prompt = processor.apply_chat_template([TURN], add_generation_prompt=True)
    row = processor.apply_chat_template(answered)
    assert row.endswith("<|im_start|>assistant \nRed.<|im_end|>") and not row.startswith(prompt)


def test_tools_and_thoughts_are_rendered(chat_model):
    call = {"name": "zoom", "arguments": {"x": 1, "name": "a"}}
    messages = [
        {"role": "user", "content": "Where?"},
        {
            "role": "assistant",
            "reasoning_content": "I look.",
            "content": "",
            "tool_calls": [{"function": call}],
        },
        {"role": "tool", "content": TURN["content"]},
        {"role": "assistant", "content": "There."},
    ]
    tools = [{"type": "function", "function": {"name": "zoom", "parameters": {}}}]
    text = library_processor(chat_model("qwen3_vl")).apply_chat_template(messages, tools=tools)
    assert text.startswith('<|im_start|>system\n# Tools\n\n<tools>\n{"type": "function"')
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "zoom", "arguments": {"x": 1, "name": "a"}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n<|vision_start|><|image_pad|><|vision_end|>What?\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\nThere.<|im_end|>\n"
    )
    thinking = library_processor(chat_model("qwen3_5"))
    assert (
        "<|im_start|>assistant\n<think>\nI look.\n</think>\n\n<tool_call>\n<function=zoom>\n<parameter=x>\n"
        "1\n</parameter>\n<parameter=name>\na\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    ) in thinking.apply_chat_template(messages)
    later = thinking.apply_chat_template([*messages, {"role": "user", "content": "Sure?"}])
    assert "I look." not in later and later.endswith("There.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n")


def test_gemma_keeps_line_breaks_and_unknown_letters(chat_model):
    tokenizer = library_processor(chat_model("gemma3")).tokenizer
    text = "a\n\n\nb 好 😀 <end_of_turn>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    names = tokenizer.convert_ids_to_tokens(ids)
    assert "\n\n\n" in names and "<0xF0>" in names and names[-1] == "<end_of_turn>"
    assert tokenizer(text).input_ids == [tokenizer.bos_token_id, *ids]


def test_rows_and_models_are_the_same_again(tmp_path, chat_rows, chat_model):
    again = make_chat_rows(tmp_path / "rows")
    first, other = ({f.name: f.read_bytes() for f in file.parent.iterdir()} for file in (chat_rows, again))
    assert first == other
    for name in FAMILIES:
        copy = save_chat_model(name, tmp_path)
        for file in chat_model(name).iterdir():
            assert (copy / file.name).read_bytes() == file.read_bytes(), file


def test_the_rows_have_both_styles_and_every_number_of_pictures(chat_rows):
    rows = [json.loads(line) for line in chat_rows.read_text().splitlines()]
    assert len(rows) == 60 and sum("messages" in row for row in rows) == 30
    said = conversations(chat_rows)
    assert {pictures(each) for each in said} == {0, 1, 2}
    assert {sum(turn["role"] == "assistant" for turn in each) for each in said} == {1, 2, 3}
    assert {each[0]["role"] for each in said} == {"system", "user"}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return functools.cache(lambda name: published_tokenizer(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].words.cut in ("", QWEN2)])
def test_a_model_reads_pictures_with_the_published_tokenizer(name, published, chat_rows, tmp_path):
    from transformers import AutoModelForImageTextToText

    tokenizer = published("gemma3" if name == "gemma3" else "qwen3")
    folder = save_chat_model(name, tmp_path, tokenizer=tokenizer)
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), library_processor(folder)
    assert len(processor.tokenizer) > 150_000
    for messages in conversations(chat_rows)[:8]:
        inputs = library_inputs(processor, messages)
        tokens = int((inputs["input_ids"] == token_of(model)).sum())
        with torch.no_grad():
            assert tokens == (features(model, inputs) if pictures(messages) else 0)
            assert torch.isfinite(model(**inputs, labels=inputs["input_ids"]).loss)


@pytest.mark.parametrize("name", ["gemma3", "idefics3"])
def test_the_processor_is_autoprocessors_where_that_opens_without_torchvision(name, chat_model, chat_rows):
    from transformers import AutoProcessor

    ours, theirs = library_processor(chat_model(name)), AutoProcessor.from_pretrained(chat_model(name))
    for messages in conversations(chat_rows)[:8]:
        found, wanted = library_inputs(ours, messages), library_inputs(theirs, messages)
        assert list(found) == list(wanted)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
