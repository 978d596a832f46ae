"""Spreading modules over ranks: sharding layout, frozen placement, recomputation, averages and gathers.

The name below is for plugins.
"""

from mm_core.parallel.gathering import gather_samples

__all__ = ["gather_samples"]
