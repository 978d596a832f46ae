"""sha256.json of a checkpoint: it follows once the checkpoint is complete, and may be given up."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from mm_core.train import checkpoint_io as files
from mm_core.train.agreement import Ranks


def write_digests(ranks: Ranks, final: Path, hurry: threading.Event) -> None:
    """Each rank reads what it has written. Called by all ranks; there is none once `hurry` is set on any."""
    doing = "summing the checkpoint"
    names = ranks.first(doing, lambda: sorted(files.read_manifest(final)))
    own = [name for name in names if name.startswith(f"__{ranks.rank}_")]
    if ranks.rank == 0:
        own += [name for name in names if not name.startswith("__")]
    digests = ranks.agree(doing, lambda: {name: files.sha256(final / name, hurry) for name in own})
    table = {name: digest for share in ranks.gather(digests) for name, digest in share.items()}
    if None in table.values():
        return
    ranks.first(doing, lambda: files.move_text(final / files.SHA256, json.dumps(table, indent=1) + "\n"))
