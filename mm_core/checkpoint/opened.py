"""A complete checkpoint whose small files are read once, when they are first needed."""

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
    """A complete checkpoint: its facts, manifest and metadata, read and checked at their first use.

    Checksums and values are checked. Every access raises DamagedError if the checkpoint is not complete.

    Attributes:
        folder: the checkpoint's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def _listed(self) -> dict[str, files.Checksum]:
        return files.read_checksums(self.folder)

    @cached_property
    def checksums(self) -> dict[str, files.Checksum]:
        """Checksums of the checkpoint's files by name; all files exist and have their sizes."""
        files.check_present(self.folder, self._listed)
        return self._listed

    @cached_property
    def facts(self) -> files.Document:
        """Facts of the checkpoint, such as `step`, with the validation results added after the save."""
        files.check_contents(self.folder, self.checksums, [files.FACTS])
        return {**checkpoint_facts.read_facts(self.folder), **checkpoint_facts.read_later(self.folder)}

    @cached_property
    def manifest(self) -> files.Document:
        """Manifest of the run that saved the checkpoint; {} if it has none. Tensor files may be missing."""
        if files.MANIFEST not in self._listed:
            return {}
        files.check_contents(self.folder, self._listed, [files.MANIFEST])
        return checkpoint_facts.read_manifest(self.folder)

    @cached_property
    def metadata(self) -> Metadata:
        """Metadata of the checkpoint's tensors: names, shapes, dtypes, and their positions in its files."""
        files.check_contents(self.folder, self.checksums, [files.METADATA])
        return read_metadata(self.folder, self.checksums)

    @property
    def adapters(self) -> Structure:
        """Adapters that the checkpoint contains; {} if its manifest lists none."""
        return structure_in(self.manifest.get("adapters"), self.folder)

    @property
    def external(self) -> list[ExternalRow]:
        """Frozen weights that the checkpoint leaves in other files, unchecked; [] if it contains all."""
        return rows_in(self.manifest, self.folder)

    @property
    def parts(self) -> set[str]:
        """Parts of the training state that the checkpoint contains: model, optimizer, ema."""
        return {name.partition(".")[0] for name in self.metadata.state_dict_metadata}

    def names(self, part: str) -> set[str]:
        """Names of the tensors in one part of the checkpoint (model, optimizer or ema)."""
        prefix = f"{part}."
        stored = self.metadata.state_dict_metadata
        return {name.removeprefix(prefix) for name in stored if name.startswith(prefix)}

    def check(self, ranks: Ranks) -> None:
        """Checks the bytes of this rank's share of the checkpoint files; DamagedError for a changed file."""
        files.check_contents(self.folder, self.checksums, self.share(ranks))

    def share(self, ranks: Ranks) -> list[str]:
        """Names of the checkpoint files that this rank checks: largest first, distributed in turn."""
        ordered = sorted(self.checksums, key=lambda name: (-self.checksums[name].size, name))
        return ordered[ranks.rank :: ranks.count]
