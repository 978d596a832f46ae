"""Token counts of conversations: measured once, and stored in a file if the config names one."""

from __future__ import annotations

import hashlib
import json
import secrets
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mm_core.errors import DataError, plural
from mm_core.runtime.ranks import Ranks
from mm_core.tasks.conversations.rows.reading import RawRow
from mm_core.tasks.conversations.token_counts import Count, lengths_of

if TYPE_CHECKING:
    from mm_core.builtin.configs.conversations import ConversationSource

_PROCESSOR = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    *("processor_config.json", "preprocessor_config.json"),  # the latter has the sizes of images
)


class Lengths:
    """Token counts of the conversations in a dataset's files, with a cache file.

    The cache file records what the counts depend on: with other annotations, another tokenizer or other
    options, rows are measured again. Changes of an image under the same name are not detected.

    Args:
        file: cache file; None: no cache.
        sources: files of the rows.
        processor: folder of the model.
        facts: everything else that the counts depend on, as JSON values.
    """

    def __init__(
        self,
        file: Path | None,
        sources: Sequence[ConversationSource],
        processor: str,
        facts: Sequence[object],
    ) -> None:
        self.file = file
        self._annotations = [Path(source.annotations) for source in sources]
        self._files = self._annotations + [Path(processor, name) for name in _PROCESSOR]
        self._facts = json.dumps([*facts, [source.folder for source in sources]])

    def of(self, rows: Sequence[RawRow], measure: Callable[[RawRow], Count]) -> Tensor:
        """Token counts [N,2] of conversations, from the cache file or measured by `lengths_of`. All ranks
        call it; the first rank reads and writes the file.

        Args:
            rows: the rows.
            measure: returns the tokens of a row, and those of its images.

        Raises:
            DataError: as for `lengths_of`; or the ranks have different numbers of rows.
        """
        ranks = Ranks.current()
        counts = ranks.gather(len(rows))
        if len(set(counts)) > 1:
            other = next(rank for rank, count in enumerate(counts) if count != counts[0])
            raise DataError(
                f"rank 0 reads {plural(counts[0], 'conversation')}, but rank {other} reads {counts[other]}",
                where=", ".join(map(str, self._annotations)),
                accepted="the same files on every machine",
            )
        kept = self._kept(len(rows)) if ranks.rank == 0 else None
        if self.file is not None:
            kept = ranks.from_first(kept)
        if kept is not None:
            return kept
        found = lengths_of(rows, measure)
        if ranks.rank == 0:
            self._keep(found)
        return found

    def _key(self) -> str:
        digest = hashlib.sha256(self._facts.encode())
        for file in self._files:
            with suppress(FileNotFoundError), file.open("rb") as held:  # files may exceed memory
                digest.update(hashlib.file_digest(held, "sha256").digest())
            digest.update(b";")
        return digest.hexdigest()

    def _kept(self, count: int) -> Tensor | None:
        if self.file is None or not self.file.is_file():
            return None
        try:
            stored = json.loads(self.file.read_text(encoding="utf-8"))
            lengths = torch.tensor(stored["lengths"], dtype=torch.int64)
            fits = stored["key"] == self._key() and lengths.shape == (count, 2)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):
            return None
        return lengths if fits else None

    def _keep(self, lengths: Tensor) -> None:
        if self.file is None:
            return
        # Two runs may write at once: each replaces the file with a complete one.
        beside = self.file.with_name(f"{self.file.name}.{secrets.token_hex(8)}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps({"key": self._key(), "lengths": lengths.tolist()}), encoding="utf-8")
            beside.replace(self.file)
        except OSError as fault:  # the run continues with the measured lengths
            warnings.warn(
                f"the measured lengths of conversations cannot be stored in {self.file}: {fault}; "
                "the next run measures them again",
                stacklevel=2,
            )
