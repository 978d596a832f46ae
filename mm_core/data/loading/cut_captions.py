"""Counts the captions that are longer than a text encoder takes, and are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mm_core.contracts import Batch, CountingTokenizer, VideoTextBatch
from mm_core.errors import plural
from mm_core.runtime.ranks import gather_rows


@dataclass
class CutCaptions:
    """The captions that have been read, those of them that were cut, and the tokens of the longest."""

    seen: int = 0
    cut: int = 0
    longest: int = 0
    limit: int = 0

    def add(self, seen: int, lengths: Sequence[int], limit: int) -> None:
        """Adds `seen` captions, and the tokens of those that were cut to `limit`."""
        self.seen += seen
        if lengths:
            self.cut, self.limit = self.cut + len(lengths), limit
            self.longest = max(self.longest, *lengths)

    def count(self, tokenizer: CountingTokenizer, captions: Sequence[str]) -> None:
        """Adds captions, and those of them that the tokenizer cuts."""
        most = tokenizer.max_length
        lengths = tokenizer.token_counts(captions) if captions else []
        self.add(len(captions), [length for length in lengths if length > most], most)

    def watch(self, batches: Iterable[Batch], note: Callable[[str], None]) -> Iterator[Batch]:
        """Passes batches on and counts their captions; a note at the first one that was cut."""
        for batch in batches:
            if isinstance(batch, VideoTextBatch):
                first = not self.cut
                limit = 0 if batch.text_ids is None else batch.text_ids.shape[1]
                self.add(len(batch), batch.cut, limit)
                if first and self.cut:
                    cut = f"a caption has {plural(self.longest, 'token')}, of which {limit:,} are read"
                    note(f"warning: {cut} (max_length of the text encoder); the run's end counts them all")
            yield batch

    def of_ranks(self, leads: bool) -> CutCaptions:
        """The sum over the ranks that lead their share of the data (`leads`). A collective call."""
        own = [self.seen, self.cut, self.longest, self.limit]
        rows = gather_rows(own if leads else [0.0] * len(own)).long()
        return CutCaptions(*rows[:, :2].sum(0).tolist(), *rows[:, 2:].amax(0).tolist())

    def described(self) -> str:
        """What was cut, in words; "" for nothing."""
        if not self.cut:
            return ""
        cut = f"{self.cut:,} of {plural(self.seen, 'caption')} cut to {plural(self.limit, 'token')}"
        return f"{cut} (max_length of the text encoder); the longest has {self.longest:,}"
