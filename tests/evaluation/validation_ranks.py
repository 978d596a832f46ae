"""Run by each rank: validates, and writes what it found.

usage: validation_ranks.py CONFIG OUT (metrics ROWS | stop | samples | fault)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from mm_core.errors import MMError
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from support.validation import Clips, Parts, stops_at


def main(config: Path, out: Path, case: str, *details: str) -> None:
    start_process_group()
    parts, rank = Parts(config), dist.get_rank()
    found: dict = {}
    if case == "metrics":
        data = Clips(int(details[0]))
        found["figures"] = parts.validator(data, ema=parts.ema).run(4)
        found["reads"] = dict(data.reads)
    elif case == "stop":  # one rank is asked, all of them leave
        stop = stops_at(3) if rank == 1 else lambda: False
        found["run"] = parts.validator(Clips(40), stop=stop).run(4)
        stop = stops_at(2) if rank == 1 else lambda: False
        found["sample"] = parts.validator(None, stop=stop).sample(4)
        found["after"] = parts.validator(Clips(8)).run(4)["validation/loss"]
    elif case == "fault":  # a rank whose rows cannot be read at all ends the others too
        try:
            parts.validator(Clips(16, broken=tuple(range(4, 16)))).run(4)
        except MMError as error:
            found["error"] = [type(error).__name__, error.what, error.where]
    else:
        found["folder"] = str(parts.validator(None, ema=parts.ema).sample(4))
        found["logged"] = parts.logged
        found["shown"] = [[clip.prompt for clip in clips] for _, clips, _ in parts.shown]
    found["notes"] = parts.notes
    (out / f"{dist.get_world_size()}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    leave(0)
