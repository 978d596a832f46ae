"""Questions laid out as the dataset's rows are: what `mm sample` and `mm chat` give to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mm_core.contracts import Question, Turn
from mm_core.data import inside
from mm_core.errors import DataError
from mm_internvl.data.chat import Chat
from mm_internvl.data.pictures import Pictures
from mm_internvl.data.rows import PLACEHOLDER, Medium, RawRow, RowTurn, conversation, read_rows


@dataclass(frozen=True)
class Asking:
    """Lays out questions for a model by its chat template and tiles. Satisfies `Conversing`.

    Inputs are `input_ids`, `attention_mask` [1,L] and `pixel_values` [N,3,Y,X]. Where nothing is shown, a
    blank tile stands before the conversation, hidden, so that the same modules run for every question.
    """

    chat: Chat
    pictures: Pictures

    def prompt(self, turns: Sequence[Turn]) -> Mapping[str, Tensor]:
        """Images of a turn stand before its text, or where the text says `<image>`. DataError for files that
        cannot be read, placeholders that do not fit them, and what is too long for an answer."""
        media: list[tuple[Medium, Path]] = [("image", path) for turn in turns for path in turn.images]
        if not turns[-1].text.strip() and not turns[-1].images:
            raise DataError("the prompt is empty, and shows nothing", accepted="words, an image, or both")
        return self._inputs([_placed(turn) for turn in turns], media, "the conversation")

    def questions(self, file: Path) -> Sequence[Callable[[], Question]]:
        """Rows as the dataset takes them; paths begin at the file's folder. What the assistant says last is
        an answer, and so are `answers`."""
        return [partial(self._question, file, row) for row in read_rows(file, 0)]

    def _question(self, file: Path, row: RawRow) -> Question:
        name = f"{file.name}, {row.place}"
        said = conversation(row.value, name, learnt=False).asked()
        media = [(kind, inside(file.parent, path)) for kind, path in said.media]
        asked = next("".join(turn.texts) for turn in reversed(said.turns) if turn.role == "user")
        if not asked.strip() and not said.media:
            raise DataError("the prompt is empty, and the row shows nothing", where=name)
        return Question(name, asked, self._inputs(said.turns, media, name), said.answers)

    def _inputs(
        self, turns: Sequence[RowTurn], media: Iterable[tuple[Medium, Path]], where: str
    ) -> Mapping[str, Tensor]:
        files = list(media)
        shown = self.pictures.shown(files)
        ids = self.chat.prompt(turns, shown, where)
        seen = torch.ones_like(ids)
        pixels = self.pictures.pixels(files, shown, len(files))
        if not len(pixels):
            blank = torch.tensor(self.chat.tokens_of_blank)
            ids, seen = torch.cat([blank, ids]), torch.cat([torch.zeros_like(blank), seen])
            pixels = self.pictures.tiling.blank()
        return {"input_ids": ids[None], "attention_mask": seen[None], "pixel_values": pixels}


def _placed(turn: Turn) -> RowTurn:
    """DataError where placeholders of the text do not fit the turn's images."""
    found = [match[1] for match in PLACEHOLDER.finditer(turn.text)]
    if not found:
        return RowTurn(turn.role, "<image>\n" * len(turn.images) + turn.text)
    if found != ["image"] * len(turn.images):
        given = len(turn.images)
        hint = "videos are shown by rows of a file" if "video" in found else None
        raise DataError(
            f"the text says {' '.join(f'<{kind}>' for kind in found)}, and {given or 'no'} "
            f"image{'s are' if given != 1 else ' is'} shown",
            where=turn.text,
            accepted="one <image> for each image, or none: then they stand before the text",
            hint="begin anew: the model itself has said it" if turn.role == "assistant" else hint,
        )
    return RowTurn(turn.role, turn.text)
