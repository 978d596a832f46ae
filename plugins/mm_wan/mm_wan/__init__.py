"""Wan 2.1 and 2.2 (https://arxiv.org/abs/2503.20314) for mm_core."""
