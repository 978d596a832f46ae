"""Turns conversations into tokens, labels and image tensors, by a model's own processor and chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from mm_core.errors import CheckpointError, first_line
from mm_core.plugin.trust.remote_code import RemoteCode
from mm_core.tasks.conversations.media import MediaReader, Shown, Size, pictures_of
from mm_core.tasks.conversations.opening import open_processor
from mm_core.tasks.conversations.placed import Learnt, Placed, put_in
from mm_core.tasks.conversations.rows.turns import PLACEHOLDER, Medium, Picture, RowTurn
from mm_core.tasks.conversations.spans import TurnContent
from mm_core.tasks.conversations.template import ChatTemplate, Fault
from mm_core.tasks.pretrained.answer_tokens import padded_cat
from mm_core.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SMALL = (32, 32)
"""Height and width of a picture that stands for none, and of those beside one that is counted."""


@dataclass(frozen=True)
class Encoded:
    """A conversation as a model takes it.

    Attributes:
        tokens: [L] int64 each: `input_ids`, `labels` (-100 where nothing is learnt) and what else
            the processor makes for each token; `label_weights` float32 if one is not 1.
        blocks: [start, end) of each picture in these tokens.
        vision: tensors of the pictures, by the names of the model's arguments; {} without pictures, or if
            only their sizes were read.
    """

    tokens: dict[str, Tensor]
    blocks: list[tuple[int, int]]
    vision: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens["input_ids"])

    def of(self, name: str) -> Tensor:
        """One of the tensors of tokens [L]; where there is none, weights are 1 and other values 0."""
        ids = self.tokens["input_ids"]
        none = torch.ones(len(ids)) if name == "label_weights" else torch.zeros_like(ids)
        return self.tokens.get(name, none)


@dataclass
class ChatProcessor:
    """A facade of the processor in a model's folder, opened when it is first used; plugins may subclass it.

    Attributes:
        folder: of the model.
        media: reads images and videos.
        reasoning: whether the thoughts of rows are kept.
        trust_remote_code: whether the folder's Python files may run.

    Raises (on first use):
        CheckpointError: the folder has no processor or tokenizer that can be opened, or no chat template.
    """

    folder: str
    media: MediaReader
    reasoning: bool = True
    trust_remote_code: RemoteCode = False

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}  # workers open it again

    def facts(self) -> list[object]:
        """JSON values on which the numbers of tokens depend, beside the dataset's options."""
        return []

    # -- parts of the folder -------------------------------------------------------------------

    @cached_property
    def processor(self) -> Any | None:
        """The library's processor; None for a model of text alone."""
        return open_processor(self.folder, self.trust_remote_code)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, which pads on the right."""
        return open_tokenizer(self.folder, self.trust_remote_code)

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template."""
        return ChatTemplate(
            self.tokenizer, self.folder, getattr(self.processor, "chat_template", None), self._own_tokens
        )

    @cached_property
    def _own_tokens(self) -> tuple[str, ...]:
        """Special tokens that processor or tokenizer know by a name of their own, such as those of images."""
        known = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        named = [] if self.processor is None else [*vars(self.processor).values()]
        named += [value for key, value in self.tokenizer.special_tokens_map.items() if key not in _USUAL]
        return tuple(dict.fromkeys(value for value in named if isinstance(value, str) and value in known))

    @cached_property
    def _image_token(self) -> str | None:
        return getattr(self.processor, "image_token", None)

    @cached_property
    def _place(self) -> re.Pattern[str]:
        """Matches a placeholder of an image, with tokens of the processor beside it."""
        around = "|".join(re.escape(t) for t in self._own_tokens if t != self._image_token) or "(?!)"
        return re.compile(f"(?:{around})*{re.escape(self._image_token or '')}(?:{around})*")

    # -- text ----------------------------------------------------------------------------------

    def messages(self, turns: Mapping[str, RowTurn], shown: Sequence[Shown]) -> dict[str, dict[str, Any]]:
        """The turns as messages for the chat template, by the same names."""
        media = iter(shown)
        return {name: self._message(turn, media) for name, turn in turns.items()}

    def _message(self, turn: RowTurn, media: Iterator[Shown]) -> dict[str, Any]:
        whole = turn.content
        given = [{"type": "text", "text": whole}] if isinstance(whole, str) else whole
        made: list[dict[str, Any]] = []
        for part in (
            p for each in given for p in (_split(each["text"]) if each["type"] == "text" else [each])
        ):
            if part["type"] == "text":
                text = self._kept_text(turn, part["text"])
                made += [{"type": "text", "text": text}] if text else []
            else:
                made += [{"type": "image"}] * len(next(media).sizes)
        if self.processor is None and any(part["type"] == "image" for part in made):
            raise Fault(*_NO_IMAGES)
        if not self.template.takes_parts:
            if any(part["type"] == "image" for part in made):
                raise Fault("the chat template takes texts alone, but the conversation has images")
            content: Any = "".join(part["text"] for part in made)
        else:
            # Templates write a line break between a content and a call, and a list of "" is one.
            content = made or ([] if turn.calls else [{"type": "text", "text": ""}])
        return {
            "role": turn.role,
            "content": content,
            **({"tool_calls": [*turn.calls]} if turn.calls else {}),
        }

    def _kept_text(self, turn: RowTurn, text: str) -> str:
        return text if self.reasoning or turn.role != "assistant" else TurnContent.of(text).words[-1]

    def places(self, text: str) -> list[tuple[int, int]]:
        """[start, end) of each picture in the template's text, with the tokens around it."""
        if self._image_token is None:
            return []
        return [match.span() for match in self._place.finditer(text)]

    # -- tokens and tensors --------------------------------------------------------------------

    def shown(self, files: Sequence[tuple[Medium, Picture]]) -> Sequence[Shown]:
        """The pictures of a conversation's images and videos, from file headers.

        Raises:
            DataError: a file cannot be read, or is too large.
        """
        return [self.media.shown(kind, file) for kind, file in files]

    def encode(
        self,
        text: str,
        spans: Sequence[Learnt],
        shown: Sequence[Shown],
        files: Sequence[Picture] | None = None,
        count: int | None = None,
    ) -> Encoded:
        """Tokens and labels of a text that the template rendered, and the tensors of its pictures.

        Args:
            text: up to the end, or cut before a picture.
            spans: what is learnt.
            shown: images and videos of the conversation.
            files: their files; None: only their sizes are used, and no tensors are made.
            count: number of pictures within the text; None: all.

        Raises:
            DataError: a file cannot be read.
        """
        sizes = [size for each in shown for size in each.sizes][:count]
        if files is None or not sizes:
            return self._counted(text, spans, sizes)
        pictures = pictures_of(files, shown, self.media)[: len(sizes)]
        # Of an array of few rows, processors take these for channels.
        return self._made(text, spans, [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in pictures])

    def _made(self, text: str, spans: Sequence[Learnt], pictures: Sequence[Any]) -> Encoded:
        made = self._called(text, pictures)
        ids = made["input_ids"][0]
        beside = {name: value[0] for name, value in made.items() if _of_tokens(value, ids)}
        moves = [
            (tuple(each["span"]), tuple(each["new_span"])) for each in made["text_replacement_offsets"][0]
        ]
        placed = Placed.of(made["offset_mapping"][0], moves)
        vision = {
            name: value
            for name, value in made.items()
            if isinstance(value, Tensor) and name not in (*beside, *_TEXT)
        }
        tokens = {name: value for name, value in beside.items() if name not in _TEXT}
        return Encoded(tokens | placed.labels(ids, spans), placed.blocks(), vision)

    def _counted(self, text: str, spans: Sequence[Learnt], sizes: Sequence[Size]) -> Encoded:
        """As `_made`, of the pictures' sizes: what the processor puts for each size is remembered."""
        places = [match.span() for match in _found(self._image_token, text)]
        whole, moves = put_in(text, places, [self._probed(size, len(sizes))[0] for size in sizes])
        found = self.tokenizer(whole, return_offsets_mapping=True, verbose=False, **self._specials(text))
        ids = torch.tensor(found["input_ids"], dtype=torch.int64)
        placed = Placed.of(torch.tensor(found["offset_mapping"]), moves)
        return Encoded({"input_ids": ids, **placed.labels(ids, spans)}, placed.blocks())

    def _specials(self, text: str) -> dict[str, bool]:
        """As the library's `apply_chat_template`: a tokenizer alone adds nothing to the template's text; a
        processor adds the first token, unless the template has written it."""
        bos = self.tokenizer.bos_token
        written = self.processor is None or (bos is not None and text.startswith(bos))
        return {"add_special_tokens": not written}

    @cached_property
    def _probed(self) -> Callable[[Size, int], tuple[str, Size | None]]:
        @lru_cache(maxsize=100_000)
        def probed(size: Size, count: int) -> tuple[str, Size | None]:
            """What the processor puts in the place of the first of several pictures, and the height and width
            at which the model sees it; None if it is cut into tiles."""
            pictures = [_black(size), *[_black(_SMALL)] * (count - 1)]
            made = self._called((self._image_token or "") * count, pictures)
            put = str(made["text_replacement_offsets"][0][0]["replacement"])
            patch = getattr(getattr(self.processor, "image_processor", None), "patch_size", None)
            if (grid := made.get("image_grid_thw")) is not None and isinstance(patch, int):
                return put, (int(grid[0, 1]) * patch, int(grid[0, 2]) * patch)
            pixels = made.get("pixel_values")
            if not isinstance(pixels, Tensor) or pixels.dim() != 4 or len(pixels) != count:
                return put, None
            return put, (int(pixels.shape[-2]), int(pixels.shape[-1]))

        return probed

    def seen(self, size: Size, count: int = 1) -> Size:
        """Height and width at which the model sees an image of a size, one of several in its conversation.

        Raises:
            Fault: it cuts images into tiles.
        """
        found = self._probed(size, count)[1]
        if found is None:
            raise Fault(
                "the model sees an image in several tiles, so that its pixels have no places of their own",
                "set boxes: relative_1000",
            )
        return found

    def _called(self, text: str, pictures: Sequence[Any]) -> Mapping[str, Any]:
        if self.processor is None:
            raise Fault(*_NO_IMAGES)
        try:
            made: Mapping[str, Any] = self.processor(
                images=[[*pictures]] if pictures else None,
                text=[text],
                return_tensors="pt",
                return_text_replacement_offsets=True,
                text_kwargs={"return_offsets_mapping": True, **self._specials(text)},
            )
        except ValueError as fault:
            raise Fault(f"the processor refuses the conversation: {first_line(fault)}") from fault
        if "text_replacement_offsets" not in made or "offset_mapping" not in made:
            raise CheckpointError(
                f"{type(self.processor).__name__} does not show where it puts images in a text",
                where=self.folder,
                accepted="a processor with a fast tokenizer that replaces `image_token`",
            )
        return made

    # -- batches -------------------------------------------------------------------------------

    @cached_property
    def blank(self) -> Encoded | None:
        """A small picture and its tokens, without labels, for batches without pictures; None if the model
        sees none."""
        if self._image_token is None:
            return None
        asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "u"}]}]
        try:
            text, why = self.template.rendered(asked), None
        except Fault as fault:
            text, why = "", fault
        if not (places := self.places(text)):
            raise CheckpointError(
                "the chat template renders no images, of which batches of text alone need a blank one",
                where=self.folder,
                hint="use the template of the model's own folder",
            ) from why
        start, end = places[0]
        return self._made(text[start:end], (), [_black(_SMALL)])

    @cached_property
    def _axes(self) -> dict[str, int]:
        """The dimension of each vision tensor that grows with the number of pictures of a conversation."""
        one, two = (
            self._called((self._image_token or "") * count, [_black(_SMALL)] * count) for count in (1, 2)
        )
        pairs = {
            name: (value.shape, two[name].shape) for name, value in one.items() if isinstance(value, Tensor)
        }
        return {
            name: next((axis for axis, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b), 0)
            for name, shapes in pairs.items()
        }

    def joined(self, rows: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Tensor]:
        """The vision tensors of a batch, from those of its rows' conversations.

        Tensors of [pictures or patches, ...] are concatenated; those of [rows, pictures, ...] have a row for
        each row of the batch, padded with zeros, which such models leave out.

        Args:
            rows: for each row of the batch, the tensors of each of its conversations.
        """
        names = dict.fromkeys(name for row in rows for vision in row for name in vision)
        made = {}
        for name in names:
            parts = [[vision[name] for vision in row if name in vision] for row in rows]
            if self._axes.get(name, 0) == 0:
                made[name] = padded_cat([part for row in parts for part in row], 0)
                continue
            some = next(part for row in parts for part in row)
            none = some[:, :0]
            made[name] = padded_cat([padded_cat(row, 1) if row else none for row in parts], 0)
        return made


_NO_IMAGES = (
    "the model's folder has no processor for images",
    "copy the model's preprocessor_config.json to its folder, or use a model that sees images",
)
_USUAL = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_TEXT = ("attention_mask", "offset_mapping", "text_replacement_offsets")


def _found(token: str | None, text: str) -> Iterator[re.Match[str]]:
    return re.finditer(re.escape(token) if token else "(?!)", text)


def _of_tokens(value: object, ids: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == (1, *ids.shape)


def _black(size: Size) -> Image.Image:
    return Image.new("RGB", size[::-1])


def _split(text: str) -> Iterator[dict[str, str]]:
    """The parts of a text with placeholders; a line break between a placeholder and text is its end."""
    place = 0
    for match in PLACEHOLDER.finditer(text):
        if before := text[place : match.start()].removeprefix("\n" if place else "").removesuffix("\n"):
            yield {"type": "text", "text": before}
        yield {"type": match[1]}
        place = match.end()
    if rest := text[place:].removeprefix("\n" if place else ""):
        yield {"type": "text", "text": rest}
