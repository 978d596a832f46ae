"""The datasets that the core ships: text rows and videos with captions."""

from typing import Any

Sample = dict[str, Any]
"""What a dataset reads, by name; the loader adds `key` and `weight`."""
