"""How many tokens each row has: measured once, and kept in a file where one is named."""

from __future__ import annotations

import hashlib
import json
import secrets
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_core.errors import DataError
from mm_internvl.config_data import Source
from mm_internvl.measuring import measured
from mm_internvl.rows import RawRow

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "processor_config.json")


class Lengths:
    """Lengths of the rows of some sources.

    The file names what they were measured with: other annotations, another tokenizer or other options are
    measured anew. Images that change under the same name are not noticed here.

    Args:
        file: None keeps nothing.
        sources: files of the rows.
        processor: the model's folder.
        facts: whatever else lengths depend on, as JSON has it.
    """

    def __init__(
        self, file: Path | None, sources: Sequence[Source], processor: str, facts: Sequence[Any]
    ) -> None:
        self.file = file
        self._files = [Path(source.annotations) for source in sources]
        self._files += [Path(processor, name) for name in _TOKENIZER]
        self._facts = json.dumps([*facts, [source.folder for source in sources]])

    def of(self, rows: Sequence[RawRow], measure: Callable[[RawRow], int]) -> Tensor:
        """[N] int64: what `measure` finds, and 0 for rows of which it raises DataError.

        Raises:
            DataError: where it does so for every row.
        """
        found = self._kept(len(rows))
        if found is None:
            found, first = [], None
            for one in measured(rows, measure):
                if isinstance(one, DataError):
                    first = first or one
                found.append(None if isinstance(one, DataError) else one)
            if first is not None and all(length is None for length in found):
                raise DataError(
                    f"none of {len(rows)} conversations can be read; the first: {first.what}",
                    where=first.where,
                ) from first
            self._keep(found)
        return torch.tensor([length or 0 for length in found], dtype=torch.int64)

    def _key(self) -> str:
        digest = hashlib.sha256(self._facts.encode())
        for file in self._files:
            with suppress(FileNotFoundError):
                digest.update(hashlib.sha256(file.read_bytes()).digest())
            digest.update(b";")
        return digest.hexdigest()

    def _kept(self, count: int) -> list[int | None] | None:
        if self.file is None or not self.file.is_file():
            return None
        try:
            stored = json.loads(self.file.read_text(encoding="utf-8"))
            fits = stored["key"] == self._key() and len(stored["lengths"]) == count
        except (OSError, ValueError, KeyError, TypeError):
            return None
        lengths: list[int | None] = stored["lengths"]
        return lengths if fits else None

    def _keep(self, lengths: Sequence[int | None]) -> None:
        if self.file is None:
            return
        # Several ranks write the same, those of other machines with the same process ids: whole files take
        # the place of one another.
        beside = self.file.with_name(f"{self.file.name}.{secrets.token_hex(8)}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps({"key": self._key(), "lengths": list(lengths)}), encoding="utf-8")
            beside.replace(self.file)
        except OSError as fault:  # measuring took long: the run goes on with what was measured
            warnings.warn(f"the lengths of conversations can not be kept: {fault}", stacklevel=2)
