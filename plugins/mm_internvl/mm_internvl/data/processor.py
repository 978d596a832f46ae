"""InternVL's tokens and tiles: the facade of its folder for conversations.

Transformers' own processor would do for its folders. This one counts tiles from file headers, shares them
among a row's images, shows frames of videos without torchvision, and reads OpenGVLab's folders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_core.contracts import IGNORED_LABEL
from mm_core.errors import CheckpointError
from mm_core.tasks import (
    PLACEHOLDER,
    ChatProcessor,
    ChatTemplate,
    Encoded,
    Learnt,
    Medium,
    Picture,
    Placed,
    RowTurn,
    Shown,
    put_in,
)
from mm_internvl.data.tiling import Tiling, read_tiling, tokens_of_tile

_PICTURE_TOKENS = {
    "start_image": "<img>",
    "end_image": "</img>",
    "context_image": "<IMG_CONTEXT>",
    "video": "<video>",
}
NEEDED = ("start_image", "end_image", "context_image")
"""Names of the tokens before, after and in place of a picture."""


@dataclass(frozen=True)
class Tiled(Shown):
    """An image or video of a conversation, with the number of tiles of each picture."""

    tiles: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """One placeholder, also for a video."""
        return 1


@dataclass
class InternVLProcessor(ChatProcessor):
    """The tokenizer, chat template and tiles of an InternVL folder.

    Attributes:
        min_tiles, max_tiles: override the folder's numbers of tiles.
        share_tiles: whether all images of a row share `max_tiles`.

    Raises (on first use):
        CheckpointError: the folder has no tokenizer, no chat template, or no tokens for images.
    """

    min_tiles: int | None = None
    max_tiles: int | None = None
    share_tiles: bool = False

    @cached_property
    def processor(self) -> Any | None:
        """None: the library's processor is not used."""
        return None

    @cached_property
    def tiling(self) -> Tiling:
        """How images are cut."""
        return read_tiling(Path(self.folder), self.min_tiles, self.max_tiles)

    @cached_property
    def template(self) -> ChatTemplate:
        """The folder's chat template; numbers that only its other files hold are checked with it."""
        _ = self._tile, self.tiling
        around = [self._names[name] for name in NEEDED]
        found = ChatTemplate(self.tokenizer, self.folder, None, around)
        if missing := [self._names[n] for n in NEEDED if self._ids[n] in (None, self.tokenizer.unk_token_id)]:
            raise CheckpointError(
                f"the tokenizer lacks {', '.join(missing)}, so it does not belong to an InternVL",
                where=self.folder,
                accepted="the folder of an InternVL model in Transformers' layout",
            )
        return found

    @cached_property
    def _names(self) -> dict[str, str]:
        return {
            name: str(getattr(self.tokenizer, f"{name}_token", None) or otherwise)
            for name, otherwise in _PICTURE_TOKENS.items()
        }

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: self.tokenizer.convert_tokens_to_ids(self._names[name]) for name in NEEDED}

    @cached_property
    def _tile(self) -> int:
        return tokens_of_tile(Path(self.folder))

    @cached_property
    def _pictures(self) -> re.Pattern[str]:
        names = {self._names["context_image"], self._names["video"], "<image>", "<video>"}
        return re.compile("|".join(re.escape(name) for name in sorted(names)))

    def facts(self) -> list[object]:
        """The sizes and numbers of tiles, of which the numbers of tokens depend."""
        return [asdict(self.tiling)]

    # -- text ----------------------------------------------------------------------------------

    def messages(self, turns: Mapping[str, RowTurn], shown: Sequence[Shown]) -> dict[str, dict[str, Any]]:
        """The turns as messages for the chat template, with tokens in place of placeholders."""
        return {name: self._message_of(turn) for name, turn in turns.items()}

    def _message_of(self, turn: RowTurn) -> dict[str, Any]:
        names = {"image": self._names["context_image"], "video": self._names["video"]}
        calls = {"tool_calls": [*turn.calls]} if turn.calls else {}

        def placed(text: str) -> str:
            return PLACEHOLDER.sub(lambda match: names[match[1]], text)

        if isinstance(turn.content, str):
            return {"role": turn.role, "content": placed(turn.content), **calls}
        parts = [
            {"type": "text", "text": placed(part["text"])}
            if part["type"] == "text"
            else {"type": part["type"]}
            for part in turn.content
        ]
        if not self.template.takes_parts:  # the same text that other templates render for parts
            texts = (part["text"] if part["type"] == "text" else f"{names[part['type']]}\n" for part in parts)
            return {"role": turn.role, "content": "".join(texts)}
        return {"role": turn.role, "content": parts}

    def places(self, text: str) -> list[tuple[int, int]]:
        """[start, end) of the placeholder of each image and video in the template's text."""
        return [match.span() for match in self._pictures.finditer(text)]

    # -- tokens and tiles ----------------------------------------------------------------------

    def shown(self, files: Sequence[tuple[Medium, Picture]]) -> list[Tiled]:
        """The tiles of a conversation's images and videos, from file headers."""
        tiling, found = self._shared([kind for kind, _ in files]), super().shown(files)
        return [
            Tiled(s.kind, s.sizes, tuple(tiling.count(*z) if s.kind == "image" else 1 for z in s.sizes))
            for s in found
        ]

    def _shared(self, kinds: Sequence[str]) -> Tiling:
        images = sum(kind == "image" for kind in kinds)
        return self.tiling.shared(images) if self.share_tiles else self.tiling

    def encode(
        self,
        text: str,
        spans: Sequence[Learnt],
        shown: Sequence[Shown],
        files: Sequence[Picture] | None = None,
        count: int | None = None,
    ) -> Encoded:
        """Tokens, labels and tiles; as of the base class."""
        tiled = [each for each in shown if isinstance(each, Tiled)][:count]
        tokens, blocks = self._tokens(text, spans, tiled)
        vision = {}
        if files and tiled:
            tiling = self._shared([each.kind for each in shown])
            vision["pixel_values"] = torch.cat(
                [self._pixels(file, each, tiling) for file, each in zip(files, tiled, strict=False)]
            )
        return Encoded(tokens, blocks, vision)

    def _pixels(self, file: Picture, shown: Tiled, tiling: Tiling) -> Tensor:
        pictures = self.media.pixels(file, shown)
        return tiling.cut(pictures[0]) if shown.kind == "image" else torch.cat([*map(tiling.frame, pictures)])

    @cached_property
    def blank(self) -> Encoded:
        """A tile of the mean colour, and its tokens."""
        start, end, context = (self._ids[name] for name in NEEDED)
        ids = torch.tensor([start, *[context] * self._tile, end])
        labels = torch.full_like(ids, IGNORED_LABEL)
        return Encoded(
            {"input_ids": ids, "labels": labels}, [(0, len(ids))], {"pixel_values": self.tiling.blank()}
        )

    def joined(self, rows: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Tensor]:
        """The tiles of a batch, one after another."""
        return {"pixel_values": torch.cat([vision["pixel_values"] for row in rows for vision in row])}

    def _tokens(
        self, text: str, spans: Sequence[Learnt], shown: Sequence[Tiled]
    ) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
        """Token ids and labels, and [start, end) of each image and video in tokens.

        Each picture is `<img><IMG_CONTEXT></img>`, frames of a video are numbered as in Transformers'
        processor, and every tile has its full length.
        """
        start, end, context = (self._names[name] for name in NEEDED)
        picture = f"{start}{context}{end}"
        puts = [
            picture
            if medium.kind == "image"
            else "\n".join(f"Frame{number}: {picture}" for number in range(1, len(medium.tiles) + 1))
            for medium in shown
        ]
        text, moves = put_in(text, self.places(text), puts)
        # Not verbose: max_length cuts what exceeds the tokenizer's own length, so no warning is needed.
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = torch.tensor(found["input_ids"], dtype=torch.int64)
        labels = Placed.of(torch.tensor(found["offset_mapping"]), moves).labels(ids, spans)
        repeats = torch.ones_like(ids)
        places = (ids == self._ids["context_image"]).nonzero().flatten()
        tiles = torch.tensor([count for medium in shown for count in medium.tiles], dtype=torch.int64)
        assert len(places) == len(tiles), "each picture is one token before its tiles are expanded"
        repeats[places] = tiles * self._tile
        ends = repeats.cumsum(0)
        blocks, first = [], 0
        for medium in shown:
            last = first + len(medium.tiles) - 1
            # `<img>` precedes the first tile, `</img>` follows the last.
            blocks.append((int(ends[places[first] - 1]) - 1, int(ends[places[last] + 1])))
            first = last + 1
        tokens = {"input_ids": ids, **labels}
        return {name: each.repeat_interleave(repeats) for name, each in tokens.items()}, blocks
