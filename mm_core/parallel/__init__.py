"""Spreading modules over ranks: sharding layout, frozen placement, recomputation, gradient averaging."""
