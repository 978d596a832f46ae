"""The datasets included in mm_core: text rows, and images and videos with captions."""

from typing import Any

Sample = dict[str, Any]
"""One sample of a dataset, by name; the loader adds `key` and `weight`."""
