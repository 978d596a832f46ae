"""A complete checkpoint, each of whose small files is read once."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from mm_core.checkpoint.external_rows import ExternalRow, rows_in
from mm_core.checkpoint.files import facts as checkpoint_facts
from mm_core.checkpoint.files import layout as files
from mm_core.checkpoint.files.metadata import read_metadata
from mm_core.runtime.ranks import Ranks
from mm_core.weights.adapters.inject import Structure
from mm_core.weights.adapters.record import structure_in


class OpenedCheckpoint:
    """A complete checkpoint. What is asked of it is read from its files and checked, by checksum and by
    value, the first time; DamagedError where it is not whole.

    Attributes:
        folder: its folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def _listed(self) -> dict[str, files.Checksum]:
        return files.read_checksums(self.folder)

    @cached_property
    def checksums(self) -> dict[str, files.Checksum]:
        """Of its files, by name, which are all there, at their sizes."""
        files.check_present(self.folder, self._listed)
        return self._listed

    @cached_property
    def facts(self) -> files.Document:
        """What it was saved with, `step` among it, and what a validation had added when this was asked."""
        files.check_contents(self.folder, self.checksums, [files.FACTS])
        return {**checkpoint_facts.read_facts(self.folder), **checkpoint_facts.read_later(self.folder)}

    @cached_property
    def manifest(self) -> files.Document:
        """What the run that saved it was made of; {} for one that does not say. Tensors may be missing."""
        if files.MANIFEST not in self._listed:
            return {}
        files.check_contents(self.folder, self._listed, [files.MANIFEST])
        return checkpoint_facts.read_manifest(self.folder)

    @cached_property
    def metadata(self) -> Metadata:
        """Of its tensors: names, shapes, dtypes, and where in its files they lie."""
        files.check_contents(self.folder, self.checksums, [files.METADATA])
        return read_metadata(self.folder, self.checksums)

    @property
    def adapters(self) -> Structure:
        """The adapters that it holds; {} for one that does not say."""
        return structure_in(self.manifest.get("adapters"), self.folder)

    @property
    def external(self) -> list[ExternalRow]:
        """What it leaves to other files, unchecked; [] for one that holds everything."""
        return rows_in(self.manifest, self.folder)

    @property
    def parts(self) -> set[str]:
        """What it holds tensors of: model, optimizer, ema."""
        return {name.partition(".")[0] for name in self.metadata.state_dict_metadata}

    def names(self, part: str) -> set[str]:
        """The names of the tensors of one part."""
        prefix = f"{part}."
        stored = self.metadata.state_dict_metadata
        return {name.removeprefix(prefix) for name in stored if name.startswith(prefix)}

    def check(self, ranks: Ranks) -> None:
        """Checks the bytes of this rank's share of the files. DamagedError for one that has changed."""
        files.check_contents(self.folder, self.checksums, self.share(ranks))

    def share(self, ranks: Ranks) -> list[str]:
        """The files that this rank checks: largest first, dealt in turn."""
        ordered = sorted(self.checksums, key=lambda name: (-self.checksums[name].size, name))
        return ordered[ranks.rank :: ranks.count]
