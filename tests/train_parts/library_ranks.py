"""Run by each rank: compares its libraries with the others', rank 1 with a folder of its own before them.

usage: library_ranks.py FOLDER
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from mm_core.config.schema import PluginsSection
from mm_core.device import start_process_group
from mm_core.errors import PluginError
from mm_core.train.assembly import check_plugins
from mm_core.train.failure import leave


class Config:
    plugins = PluginsSection()


start_process_group()
if dist.get_rank() == 1:
    sys.path.insert(0, sys.argv[1])
try:
    check_plugins(Config())
except PluginError as error:
    print(error)
dist.barrier()
dist.destroy_process_group()
leave(0)
