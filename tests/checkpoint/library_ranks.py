"""Run by each rank: compares its libraries with the others', rank 1 with a folder of its own before them.

usage: library_ranks.py FOLDER
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from mm_core.checkpoint.run_manifest import check_plugins
from mm_core.errors import PluginError
from mm_core.plugin.registry import get_registry
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from mm_core.runtime.ranks import Ranks

start_process_group()
if dist.get_rank() == 1:
    sys.path.insert(0, sys.argv[1])
try:
    check_plugins(get_registry(), Ranks.current())
except PluginError as error:
    print(error)
dist.barrier()
dist.destroy_process_group()
leave(0)
