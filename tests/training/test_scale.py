"""What a forecast says of many ranks: what they send and over which links, checkpoints, and the start."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from mm_core.config.load import load_config
from mm_core.device.machines import Machine, machine_of
from mm_core.plan import build_task, plan_shown
from mm_core.training.forecast.forecast import Forecast
from mm_core.training.forecast.meter import Work
from mm_core.training.forecast.scale import STORAGE
from mm_core.training.forecast.seconds import of_call
from mm_core.training.forecast.study import Study

ABSENT = ("data.train.annotations=absent.json", "train.micro_batch_size=1", "train.global_batch_size=null")


def forecast_of(path: Path, machine: str | Machine, *overrides: str) -> Forecast:
    config = load_config(path, [*ABSENT, *overrides])
    on = machine_of(machine) if isinstance(machine, str) else machine
    plan, samples = plan_shown(config, on.world, build_task(config, {}))
    return Study(config, plan, on, samples, {}).forecast()


def sent(found: Forecast) -> dict[tuple[str, str], int]:
    return {(each.kind, each.link): each.bytes for each in found.scale.sent if each.bytes > 1000}


def trained(path: Path) -> int:
    config = load_config(path, list(ABSENT))
    return sum(p.numel() for p in build_task(config, {}).get_submodule("predictor").parameters())


# -- communication -----------------------------------------------------------------------------------


def test_what_ranks_send_is_that_of_their_shards_and_replicas(tiny):
    size = 4 * trained(tiny)
    whole = sent(forecast_of(tiny, "2x2xH100"))
    assert whole.keys() == {("all-gather", "network"), ("reduce-scatter", "network")}
    # A rank sends three of four parts: forward and backward gather the weights, one reduction has
    # gradients. Shards have whole rows, so that some are padded.
    assert whole["reduce-scatter", "network"] == pytest.approx(size * 3 / 4, rel=0.05)
    assert size * 3 / 4 * 0.95 < whole["all-gather", "network"] < 2 * size * 3 / 4 * 1.05
    hybrid = sent(forecast_of(tiny, "2x2xH100", "engine.sharding_size=2"))
    assert hybrid.keys() == {("all-gather", "link"), ("reduce-scatter", "link"), ("all-reduce", "network")}
    # Of the half that a rank has after the reduction on its host, the sum of two hosts sends it once.
    assert hybrid["all-reduce", "network"] == pytest.approx(size / 2, rel=0.05)


def test_ranks_that_share_tokens_exchange_them(tiny):
    assert ("all-to-all", "link") in sent(forecast_of(tiny, "2xH100", "engine.context_parallel.size=2"))


def test_one_rank_sends_nothing_and_has_no_start_to_share(tiny):
    found = forecast_of(tiny, "1xH100")
    assert not found.scale.sent and not found.scale.start
    assert not any("sends" in line or "start" in line for line in found.render())


def test_a_step_is_limited_by_the_part_that_is_busy_longest(tiny):
    machine = machine_of("2x2xH100")
    slow = replace(machine, device=replace(machine.device, network=1e6))
    found = forecast_of(tiny, slow)
    first, *others = found.scale.busy
    assert first == "network" and {"compute", "memory", "host"} <= {*others}
    step = sum(found.seconds.values())
    assert found.scale.busy["network"] == pytest.approx(step, rel=0.05)
    assert any(line.startswith("  limited by network, busy for") for line in found.render())
    quick = replace(machine, device=replace(machine.device, call=1.0))
    assert next(iter(forecast_of(tiny, quick).scale.busy)) == "host"


def test_a_device_of_unknown_speed_has_bytes_and_no_seconds(tiny):
    scale = forecast_of(tiny, "2x24GB").scale
    assert scale.sent and not scale.busy and not any(each.seconds for each in scale.sent)


def test_a_byte_takes_longer_around_more_ranks_and_hosts():
    small = Work("communication", "_allgather_base_", "bfloat16", 0, 1000, group=8, span=8)
    one, hosts = machine_of("8xH100"), machine_of("128x8xH100")
    far = small._replace(group=1024, span=1024)
    assert of_call(far, hosts) > 50 * of_call(small, one)
    summed = far._replace(name="allreduce_")  # a tree
    assert of_call(small, one) < of_call(summed, hosts) < of_call(far, hosts) / 5


def test_views_of_the_other_ranks_shards_change_nothing(tiny, monkeypatch):
    own = forecast_of(tiny, "3xH100")
    monkeypatch.setattr("mm_core.runtime.groups.own_shards_only", nullcontext)
    assert forecast_of(tiny, "3xH100") == own


# -- checkpoints and the start -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("ema.decay=0.9",)])
def test_a_checkpoint_has_the_bytes_and_files_of_the_forecast(tiny, mm, tmp_path, more):
    words = ("train.steps=2", f"run.dir={tmp_path}", "task.predictor.ffn_dim=16384", *more)
    expected = forecast_of(tiny, "1xcpu", *words).scale.checkpoint
    assert mm("train", "--config", tiny, *words).code == 0
    folder = next(tmp_path.glob("*/checkpoints/step_*"))
    files = [file for file in folder.iterdir() if file.is_file()]
    assert len(files) == expected.files
    tensors = [file.stat().st_size for file in files if file.suffix == ".distcp"]
    assert sum(tensors) == pytest.approx(expected.bytes, rel=0.1)  # each tensor has a header


def test_adapters_are_stored_without_their_base_unless_asked(tiny):
    adapter = "train.adapters=[{rank: 4, targets: auto}]"
    alone = forecast_of(tiny, "2xH100", adapter).scale.checkpoint
    both = forecast_of(tiny, "2xH100", adapter, "checkpoint.frozen=true").scale.checkpoint
    assert both.bytes - alone.bytes == 4 * trained(tiny)


def test_training_waits_for_a_copy_or_for_the_storage(tiny):
    late, now = (
        forecast_of(tiny, "2x1xH100", f"checkpoint.async={on}").scale.checkpoint for on in ("true", "false")
    )
    assert late.bytes == now.bytes and late.rank_bytes == pytest.approx(late.bytes / 2, rel=0.1)
    assert now.waits == now.writes == pytest.approx(now.bytes / 2 / STORAGE)
    assert late.waits < now.waits < late.writes


def test_replicas_read_all_weights_on_each_host_and_shards_their_own(tiny):
    def weights(*words: str) -> float:
        return forecast_of(tiny, "4x2xH100", *words).scale.start["weights"]

    assert weights("engine.preset=ddp") == pytest.approx(weights("engine.sharding_size=2"))
    assert weights() == pytest.approx(weights("engine.sharding_size=2") / 4, rel=0.2)


def test_an_engine_whose_steps_are_unknown_has_its_checkpoint(tiny, monkeypatch):
    monkeypatch.setattr("mm_core.training.forecast.study.ShardedPlan", type(None))
    found = forecast_of(tiny, "2xH100")
    assert [need.phase for need in found.needs] == ["states"]
    assert found.scale.checkpoint.files == 2 + 5 and not found.scale.sent
