"""Spreading modules over ranks: sharding layout, frozen placement, recomputation, averages and gathers.

The names below are for plugins.
"""

from mm_core.parallel.activation_checkpointing import recompute
from mm_core.parallel.frozen_placement import place, plan_frozen
from mm_core.parallel.gathering import gather_samples
from mm_core.parallel.layout import decide_layout
from mm_core.runtime.groups import device_mesh

__all__ = ["decide_layout", "device_mesh", "gather_samples", "place", "plan_frozen", "recompute"]
