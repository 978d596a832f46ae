"""The table of `--dry-run`: a run's base in other forms, each one change to what is configured."""

from __future__ import annotations

import pytest

from mm_core.contracts import EnginePlan
from mm_core.device.torch_private import shards_mixed
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.plan import base_choices, table_of
from support import runs

ADAPTERS = [{"targets": ["predictor.blocks.{*}"], "rank": 2}]

pytestmark = pytest.mark.skipif(not shards_mixed(), reason="this torch shards no module of mixed dtypes")


def choices(folder, base=None, dtype="bf16", **task):
    engine = {"type": "fsdp2", "param_dtype": "bf16", "recompute_modules": "auto"}
    engine |= {"base": base} if base else {}
    video = {**runs.VIDEO, "predictor": {**runs.VIDEO["predictor"], "num_layers": 6}}
    train = {"epochs": 1, "adapters": ADAPTERS, "base_dtype": dtype}
    config = runs.config_of(folder, video, train=train, engine=engine)
    return {one.label: one for one in base_choices(config, 1, {})}


def test_streaming_is_added_with_the_keep_of_the_config(tmp_path, monkeypatch):
    seen: list[EnginePlan] = []
    plan = FSDP2Engine.plan
    monkeypatch.setattr(FSDP2Engine, "plan", lambda *a, **k: seen.append(plan(*a, **k)) or seen[-1])
    found = choices(tmp_path, {"stream": False, "keep": 3})
    assert list(found) == ["as configured", "+ stream", "+ int8", "+ nf4"]
    assert [one.base.keep if one.base else None for one in seen] == [None, 3, None, None]
    assert found["+ stream"].host_bytes > 0


def test_a_streamed_base_stays_so_in_other_dtypes_and_the_label_names_it(tmp_path):
    kept, plain = {"stream": True, "keep": 3}, {"stream": False, "keep": 3}
    found = choices(tmp_path, kept)
    assert list(found) == ["as configured, streamed", "not streamed", "+ int8, streamed", "+ nf4, streamed"]
    resident, quantised = choices(tmp_path, plain), choices(tmp_path, kept, "int8")
    assert found["not streamed"].device_bytes == resident["as configured"].device_bytes
    assert found["as configured, streamed"].device_bytes == resident["+ stream"].device_bytes
    assert found["+ int8, streamed"].device_bytes == quantised["as configured, streamed"].device_bytes
    assert list(quantised) == ["as configured, streamed", "not streamed", "+ nf4, streamed"]
    table = table_of(tuple(found.values()))
    assert len({len(line) for line in table[1:]}) == 1, "columns"
