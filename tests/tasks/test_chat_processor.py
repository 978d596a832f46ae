"""The dataset `conversations` and the library's own processors: tokens, images, labels, losses, batches."""

from __future__ import annotations

import json
import re

import pytest
import torch
from PIL import Image

from mm_core.builtin.configs.conversations import ConversationSource
from mm_core.contracts import IGNORED_LABEL, TextBatch
from mm_core.tasks import Conversations
from support.chat_families import FAMILIES
from support.chat_rows import library_inputs, library_processor, messages_of

CHATML = (r"<\|im_start\|>assistant ?\n(?:<think>\n(?=\n</think>))?", r"<\|im_end\|>")
MARKS = {
    **dict.fromkeys(("gemma3",), (r"<start_of_turn>model\n", r"<end_of_turn>")),
    **dict.fromkeys(("smolvlm", "idefics3"), (r"\nAssistant:", r"<end_of_utterance>")),
}
"""Before and after what each model writes, read from its template by hand."""


def dataset(folder, file, **options):
    return Conversations([ConversationSource(str(file))], str(folder), **options)


def opened(folder, file):
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    return model, dataset(folder, file, max_length=2048), library_processor(folder)


def batch_of(found, indices):
    return found.collate([{**found[i], "key": i, "weight": 1.0} for i in indices])


def expanded(processor, messages, made):
    """The text that the processor tokenized."""
    from transformers import ProcessorMixin  # SmolVLM's own method needs the part for videos

    text, moved = ProcessorMixin.apply_chat_template(processor, messages, tokenize=False), []
    place = 0
    for each in made["text_replacement_offsets"][0] if "text_replacement_offsets" in made else ():
        moved += [text[place : each["span"][0]], each["replacement"]]
        place = each["span"][1]
    return "".join([*moved, text[place:]])


def labels_by_hand(name, processor, messages):
    offsets = {"return_offsets_mapping": True}
    made = library_inputs(
        processor,
        messages,
        processor_kwargs={"text_kwargs": offsets, "return_text_replacement_offsets": True},
    )
    head, end = MARKS.get(name, CHATML)
    text = expanded(processor, messages, made)
    spans = [match.span(1) for match in re.finditer(f"{head}(.*?{end})", text, re.DOTALL)]
    assert len(spans) == sum(turn["role"] == "assistant" for turn in messages)
    begins = made["offset_mapping"][0][:, 0]
    learnt = sum(((begins >= start) & (begins < stop) for start, stop in spans), torch.zeros(len(begins)) > 0)
    return torch.where(learnt, made["input_ids"][0], IGNORED_LABEL)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_sixty_conversations_are_those_of_the_library(name, chat_model, chat_rows):
    folder = chat_model(name)
    found, library = dataset(folder, chat_rows, max_length=2048), library_processor(folder)
    for index, line in enumerate(chat_rows.read_text().splitlines()):
        messages = messages_of(json.loads(line), chat_rows.parent)
        wanted = library_inputs(library, messages)
        (piece,) = found[index]["pieces"]
        assert torch.equal(piece.tokens["labels"], labels_by_hand(name, library, messages))
        has_images = any(part["type"] == "image" for turn in messages for part in turn["content"])
        for key in [key for key, value in wanted.items() if key != "attention_mask" and value.numel()]:
            own = piece.vision.get(key) if key in piece.vision else piece.of(key)[None]
            assert torch.equal(wanted[key], own), (index, key)
        assert bool(piece.vision) == has_images
        counted, whole = found.chat.row(*_row(found, index), pixels=False)
        assert whole and torch.equal(counted.tokens["input_ids"], piece.tokens["input_ids"])
        assert counted.blocks == piece.blocks and not counted.vision


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "smolvlm"])
@pytest.mark.parametrize("size", [(40, 3), (3, 40), (1, 1)])
def test_rows_of_a_small_image_are_not_taken_for_channels(name, size, chat_model, tmp_path):
    Image.effect_noise(size, 99).convert("RGB").save(tmp_path / "a.png")
    parts = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A line."}]}
    row = {"messages": [{"role": "user", "content": parts}, answer]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    found = dataset(chat_model(name), tmp_path / "rows.jsonl", max_length=2048)
    wanted = library_inputs(library_processor(chat_model(name)), messages_of(row, tmp_path))
    (piece,) = found[0]["pieces"]
    assert torch.equal(piece.vision["pixel_values"], wanted["pixel_values"])
    assert found.lengths().tolist() == [len(piece)] == [wanted["input_ids"].numel()]


def _row(found, index):
    name, conversation, files = found._checked(found.rows[index])
    return conversation, files, name


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_has_the_loss_and_gradients_of_its_rows(name, chat_model, chat_rows):
    """A mixed batch, in one forward, against the rows one by one as the library prepares them."""
    model, found, library = opened(chat_model(name), chat_rows)
    rows = [0, 3, 5]
    assert [bool(found[row]["pieces"][0].vision) for row in rows] == [True, False, True]
    batch = batch_of(found, rows)
    assert isinstance(batch, TextBatch)
    loss = model(**batch.inputs, use_cache=False).loss
    loss.backward()
    got = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    lines, total, count = chat_rows.read_text().splitlines(), 0.0, 0
    for row in rows:
        messages = messages_of(json.loads(lines[row]), chat_rows.parent)
        given = {key: value for key, value in library_inputs(library, messages).items() if value.numel()}
        labels = labels_by_hand(name, library, messages)[None]
        number = int((labels[:, 1:] != IGNORED_LABEL).sum())
        total, count = total + model(**given, labels=labels, use_cache=False).loss * number, count + number
    (total / count).backward()
    assert torch.allclose(loss, total / count, rtol=1e-6)
    norm = torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None]).norm()
    for key, value in model.named_parameters():
        if value.grad is not None:
            assert (value.grad - got[key]).norm() <= 1e-6 * norm, key


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_text_rows_run_the_tower_on_a_blank_image_without_changing_the_loss(name, chat_model, chat_rows):
    model, found, library = opened(chat_model(name), chat_rows)
    batch = batch_of(found, [3])
    assert set(batch.inputs) == set(batch_of(found, [0]).inputs)
    loss = model(**batch.inputs, use_cache=False).loss
    loss.backward()
    messages = messages_of(json.loads(chat_rows.read_text().splitlines()[3]), chat_rows.parent)
    given = {key: value for key, value in library_inputs(library, messages).items() if value.numel()}
    alone = model(**given, labels=labels_by_hand(name, library, messages)[None], use_cache=False).loss
    assert torch.allclose(loss, alone, rtol=1e-6)
    tower = [value.grad for key, value in model.named_parameters() if "vis" in key and "lm_head" not in key]
    assert tower and any(grad is not None for grad in tower)
    assert all(grad is None or not grad.any() for grad in tower)


@pytest.mark.parametrize(
    ("name", "told"),
    [("llava_onevision", True), ("qwen3_5", True), *((n, False) for n in ("qwen3_vl", "gemma3", "smolvlm"))],
)
def test_a_start_tells_where_rows_begin_answers_otherwise_than_prompts(
    name, told, chat_model, chat_rows, caplog
):
    """In text, or in tokens: the line break of an opened thought and that of an empty one are one token."""
    found = dataset(chat_model(name), chat_rows, max_length=2048)
    sentence = "begins an answer otherwise in a conversation than after a prompt"
    assert (sentence in caplog.text) == told
    tokenizer, messages = found.chat.processor.tokenizer, [{"role": "user", "content": [_SAID]}]
    prompt = tokenizer(found.chat.processor.template.rendered(messages, prompt=True))["input_ids"]
    answered = found.chat.processor.template.rendered([*messages, {"role": "assistant", "content": [_SAID]}])
    assert (tokenizer(answered)["input_ids"][: len(prompt)] != prompt) == told


_SAID = {"type": "text", "text": "red"}
