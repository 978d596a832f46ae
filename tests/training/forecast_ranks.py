"""A rank of a run that forecasts what is too small for it otherwise."""

from __future__ import annotations

import sys

from mm_core.config.load import load_config
from mm_core.runtime.launch.rank_process import leave
from mm_core.training.forecast import in_run
from mm_core.training.run import train

if __name__ == "__main__":
    in_run.SMALL = 0.0
    train(load_config(sys.argv[1], sys.argv[2:]))
    leave(0)
