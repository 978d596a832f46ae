"""One of two ranks sleeps 30 ms in each step: the times of the steps are equal, and it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mm_core.report.reading import read_run

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).parents[1] / "runtime/faulty.py"


@pytest.mark.parametrize("fault", ["slow forward", "slow data"])
def test_the_rank_that_the_other_waits_for_is_named_within_60_steps(tiny, tmp_path, mm, fault):
    config = yaml.safe_load(tiny.read_text())
    config["task"]["type"], config["data"]["train"]["type"] = "local/faulty_task", "local/faulty_data"
    config["plugins"] = {"path": [str(PLUGIN)]}
    config["train"] |= {"steps": 60, "global_batch_size": 4}  # a rank takes two samples a step
    config["checkpoint"], config["lr_schedule"] = {"every": 1000}, {"type": "constant"}
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump(config))
    done = mm("train", "--config", path, "--nproc", 2, f"run.dir={tmp_path}", FAULT=fault)
    assert done.code == 0, done.err
    (row,) = map(json.loads, (tmp_path / "tiny/slow_ranks.jsonl").read_text().splitlines())
    assert row["step"] <= 60 and row["rank"] == 1
    (remark,) = read_run(tmp_path / "tiny", "tiny").remarks
    assert remark in done.out + done.err and remark.startswith("step 50: rank 1 (")
    assert ", cpu) is slow: 0." in remark and remark.endswith("; all ranks wait for it")
