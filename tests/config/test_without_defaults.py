"""A part of a config without its defaults: it reads back as the same."""

from __future__ import annotations

import pytest

from mm_core.config.dump import plain, without_defaults
from mm_core.plugin.registry import get_registry
from mm_core.schema.checking import check_component


@pytest.mark.parametrize(
    ("given", "shorter"),
    [
        ({"annotations": "a"}, {}),
        ({"annotations": "a", "weight": 2, "columns": {"caption": ["x", "y"]}}, {}),
        ({"annotations": "a", "weight": 1.0, "tags": {"separator": ","}}, {"annotations": "a", "tags": {}}),
    ],
)
@pytest.mark.parametrize(
    "reader", [{}, {"reader": {"type": "core/decord"}}, {"reader": {"type": "core/pyav", "max_pixels": 9}}]
)
def test_what_has_its_default_is_left_out(given: dict, shorter: dict, reader: dict) -> None:
    registry = get_registry()
    section = {"type": "core/media_text", "sources": [given], **reader}
    checked = check_component("dataset", section, registry, "data.train")
    written = {"type": checked.type, **{key: plain(value) for key, value in checked.options.items()}}
    found = without_defaults(written, checked, registry)
    assert found == {**section, "sources": [shorter or given]}
    assert check_component("dataset", found, registry, "data.train") == checked
