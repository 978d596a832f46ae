"""How many tokens each row has: measured once, and kept in a file where one is named."""

from __future__ import annotations

import hashlib
import json
import secrets
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mm_core.errors import DataError
from mm_internvl.data.config import Source
from mm_internvl.data.rows import RawRow
from mm_internvl.data.token_counts import gathered, lengths_of

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
        self, file: Path | None, sources: Sequence[Source], processor: str, facts: Sequence[object]
    ) -> None:
        self.file = file
        self._annotations = [Path(source.annotations) for source in sources]
        self._files = self._annotations + [Path(processor, name) for name in _TOKENIZER]
        self._facts = json.dumps([*facts, [source.folder for source in sources]])

    def of(self, rows: Sequence[RawRow], measure: Callable[[RawRow], int]) -> Tensor:
        """`lengths_of` the rows, or what the file says of them. Of several ranks, called by all of them, the
        first one reads and writes the file.

        Raises:
            DataError: as of `lengths_of`; ranks that have other rows.
        """
        counts = gathered(len(rows))
        if len(set(counts)) > 1:
            other = next(rank for rank, count in enumerate(counts) if count != counts[0])
            raise DataError(
                f"rank 0 reads {counts[0]} conversations, and rank {other} reads {counts[other]}",
                where=", ".join(map(str, self._annotations)),
                accepted="the same files on every machine",
            )
        first = len(counts) == 1 or dist.get_rank() == 0
        kept = [self._kept(len(rows)) if first else None]
        if self.file is not None and len(counts) > 1:
            dist.broadcast_object_list(kept, src=0)
        if kept[0] is not None:
            return kept[0]
        found = lengths_of(rows, measure)
        if first:
            self._keep(found)
        return found

    def _key(self) -> str:
        digest = hashlib.sha256(self._facts.encode())
        for file in self._files:
            with suppress(FileNotFoundError):
                digest.update(hashlib.sha256(file.read_bytes()).digest())
            digest.update(b";")
        return digest.hexdigest()

    def _kept(self, count: int) -> Tensor | None:
        if self.file is None or not self.file.is_file():
            return None
        try:
            stored = json.loads(self.file.read_text(encoding="utf-8"))
            lengths = torch.tensor(stored["lengths"], dtype=torch.int64)
            fits = stored["key"] == self._key() and lengths.shape == (count,)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):
            return None
        return lengths if fits else None

    def _keep(self, lengths: Tensor) -> None:
        if self.file is None:
            return
        # Two runs may write at once: whole files take the place of one another.
        beside = self.file.with_name(f"{self.file.name}.{secrets.token_hex(8)}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps({"key": self._key(), "lengths": lengths.tolist()}), encoding="utf-8")
            beside.replace(self.file)
        except OSError as fault:  # measuring took long: the run goes on with what was measured
            warnings.warn(f"the lengths of conversations cannot be kept: {fault}", stacklevel=2)
