"""Every label is right by the chat template: against Transformers' own marking of the assistant's tokens."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mm_internvl.data.processor import InternVLProcessor as Processor
from mm_internvl.data.processor import Tiled
from mm_internvl.testing import CHAT_TEMPLATE, TOKENS, make_tiny_checkpoint
from transformers import AutoTokenizer
from transformers.models.internvl.processing_internvl import InternVLProcessor

from mm_core.contracts import IGNORED_LABEL
from mm_core.data.media.readers import PyAVReader
from mm_core.errors import CheckpointError
from mm_core.tasks import MediaReader
from mm_core.tasks.conversations.chat import Chat
from mm_core.tasks.conversations.rows.reading import conversation

MARKED = CHAT_TEMPLATE.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}",
).replace("{{ '<|im_end|>\n' }}", "{{ '<|im_end|>\n' }}{% endif %}")
"""The same template, which says itself what the assistant's is (Transformers' `{% generation %}`)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


SAID = [
    *("what", " is", "the", " colour", "assistant\n", "user", "<think>", "<box>", "</box>", "?", "7"),
    *("\n", "\n\n", " ", "\t", "\u2028", "你好", "é", "e\u0301", "😀", "👩‍🚀"),
    *("<", "|im_end|", "<|im_start", "{{ x }}", "{% if %}"),
    *(
        "\r\n",
        "\r",
        "\u0301",
        "\u0344",
        "\u1100\u1161",
        "a\u0307\u0323",
        "\u0338",
    ),  # lines; NFC changes the others
]
words = st.lists(st.sampled_from(SAID), max_size=8).map("".join)
pictures = st.sampled_from(["", "", "", "<image>\n", "<video>\n", "<image><image> ", "a <image> b"])


@st.composite
def rows(draw):
    """(row, roles and texts, tiles of each image and frame of each video in order)."""
    turns = [("system", draw(words))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        turns += [("user", draw(pictures) + draw(words) + draw(pictures))] * draw(st.integers(1, 2))
        turns.append(("assistant", draw(words)))
    kinds = [m for role, text in turns if role == "user" for m in _kinds(text)]
    shown = [
        Tiled(kind, (), (draw(st.integers(1, 3)),) if kind == "image" else (1,) * draw(st.integers(1, 3)))
        for kind in kinds
    ]
    files = {kind: [f"{kind}_{n}" for n in range(kinds.count(kind))] for kind in ("image", "video")}
    if draw(st.booleans()):
        names = {"user": "human", "assistant": "gpt", "system": "system"}
        said = [{"from": names[role], "value": text} for role, text in turns]
        return {"conversations": said, **files}, turns, shown
    return {"messages": [{"role": role, "content": text} for role, text in turns], **files}, turns, shown


def _kinds(text):
    return [part[:5] for part in text.split("<") if part.startswith(("image>", "video>"))]


def expected(tokenizer, turns, shown):
    """ids and labels by Transformers alone, images and videos written out before."""
    processor = SimpleNamespace(
        start_image_token="<img>",
        end_image_token="</img>",
        image_token="<IMG_CONTEXT>",
        image_seq_length=TOKENS,
    )
    media = iter(shown)
    messages = []
    for role, text in turns:
        while (
            place := min((p for k in ("<image>", "<video>") if (p := text.find(k)) >= 0), default=-1)
        ) >= 0:
            medium = next(media)
            if medium.kind == "image":
                put = InternVLProcessor.replace_image_token(processor, {"num_patches": medium.tiles}, 0)
            else:
                clip = SimpleNamespace(shape=(len(medium.tiles),))
                put = InternVLProcessor.replace_video_token(processor, {"pixel_values_videos": [clip]}, 0)
            text = text[:place] + put + text[place + 7 :]
        messages.append({"role": role, "content": text})
    found = tokenizer.apply_chat_template(
        messages, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, marked = found["input_ids"], found["assistant_masks"]
    mask = list(marked)
    line = tokenizer.convert_tokens_to_ids("Ċ")
    for place in range(1, len(ids)):
        if marked[place] and not marked[place - 1] and ids[place - 1] != line:
            mask[place] = 0  # a token of two line breaks, the first of which is the prompt's
    return ids, [token if learnt else IGNORED_LABEL for token, learnt in zip(ids, mask, strict=True)]


@pytest.mark.skipif(
    not hasattr(InternVLProcessor, "replace_image_token"),
    reason="the processor writes images out from 5.0 on",
)
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(made=rows())
def test_every_label_is_right(folder, tokenizer, made):
    row, turns, shown = made
    chat = CHATS.setdefault(folder, Chat(processor_of(folder), 100_000))
    chat.processor.shown = lambda files: shown
    tokens, whole = chat.row(conversation(row, "row"), [], "row", pixels=False)
    ids, labels = expected(tokenizer, turns, shown)
    assert tokens.of("input_ids").tolist() == ids
    assert tokens.of("labels").tolist() == labels
    assert whole and len(tokens.blocks) == len(shown)


CHATS: dict = {}


def processor_of(folder) -> Processor:
    return Processor(str(folder), MediaReader(3, 10**6, PyAVReader()))


def test_tokens_of_a_tile_are_those_that_the_model_makes(tmp_path):
    """The processor's number, else the model's, else what follows from sizes, as in OpenGVLab's layout."""
    folder = make_tiny_checkpoint(tmp_path)
    (folder / "processor_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    published = {"force_image_size": 448, "vision_config": {"image_size": 448, "patch_size": 14}}
    del config["image_seq_length"]
    for change, tokens in (
        ({"image_seq_length": 9}, 9),
        ({}, TOKENS),
        ({**published, "downsample_ratio": 0.5}, 256),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        assert len(processor_of(folder).blank) == tokens + 2
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="the file contains no JSON object"):
        assert processor_of(folder).template
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match="does not define the number of tokens per tile: KeyError"):
        assert processor_of(folder).template


def test_a_tokenizer_without_image_tokens(tmp_path):
    folder = make_tiny_checkpoint(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text().replace("<IMG_CONTEXT>", "<other>")
        (folder / name).write_text(text.replace('"context_image_token": "<other>",', ""))
    with pytest.raises(CheckpointError, match="lacks <IMG_CONTEXT>, so it does not belong to an InternVL"):
        assert processor_of(folder).template


def test_a_template_that_shows_no_lists_is_given_tokens_of_images(tmp_path):
    """Qwen3's own, which stands in OpenGVLab's folders, renders nothing of a list."""
    folder = make_tiny_checkpoint(tmp_path)
    first, last = CHAT_TEMPLATE.index("{% else %}"), CHAT_TEMPLATE.index("{% endif %}{{ '<|im_end|>")
    parts = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "what"}]
    asked = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]}
    found = []
    for template in (CHAT_TEMPLATE, CHAT_TEMPLATE[:first] + CHAT_TEMPLATE[last:]):
        (folder / "chat_template.jinja").write_text(template)
        chat = Chat(processor_of(folder), 200)
        chat.processor.shown = lambda files: [Tiled("image", (), (2,))]
        found.append(chat.row(conversation(asked, "row"), [], "row", pixels=False)[0].of("input_ids"))
    assert found[0].equal(found[1])
