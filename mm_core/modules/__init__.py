"""Edits to any module: path patterns, freezing, tying, casting, initialisation, FLOPs.

The names below are for plugins.
"""

from mm_core.modules.adapter_layers import adapted_layers
from mm_core.modules.casting import cast_as_planned, cast_inputs, check_dtypes, uncast_inputs
from mm_core.modules.flat_shards import FlatShard
from mm_core.modules.initialise import initialise
from mm_core.modules.patterns import match
from mm_core.modules.shards import gathered, like, local
from mm_core.modules.tying import state_of, tie, tied_names

__all__ = [
    "FlatShard",
    "adapted_layers",
    "cast_as_planned",
    "cast_inputs",
    "check_dtypes",
    "gathered",
    "initialise",
    "like",
    "local",
    "match",
    "state_of",
    "tie",
    "tied_names",
    "uncast_inputs",
]
