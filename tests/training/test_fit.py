"""`--fit`: settings that fit a machine, each of which needs and takes what its own forecast shows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mm_core.config.load import load_config
from mm_core.device.machines import Machine, machine_of
from mm_core.errors import MMError
from mm_core.plan import build_task, plan_shown
from mm_core.training.forecast.fit import ROOM, Search, _placed, shown
from mm_core.training.forecast.forecast import of_phases
from mm_core.training.forecast.study import Study

WIDE = (
    "task.predictor.num_layers=4",
    "task.predictor.ffn_dim=8192",
    "data.train.annotations=absent.json",
    "train.global_batch_size=32",
    "train.micro_batch_size=4",
)
GIB = 2**30


def small(memory: float) -> Machine:
    """A device of some memory, all of which is the run's."""
    machine = machine_of("1xH100")
    return replace(machine, device=replace(machine.device, memory=round(memory), context=0))


def study_of(path, machine: str | Machine, *overrides: str) -> Study:
    config = load_config(path, overrides)
    on = machine_of(machine) if isinstance(machine, str) else machine
    plan, samples = plan_shown(config, on.world, build_task(config, {}))
    return Study(config, plan, on, samples, {})


def search_of(path, machine: str | Machine, *overrides: str, fixed: tuple[str, ...] = ()) -> Search:
    def load(more):
        return load_config(path, [*overrides, *more, *fixed])

    keys = [word.partition("=")[0] for word in fixed]
    return Search(load, keys, study_of(path, machine, *overrides, *fixed))


def peak(found) -> int:
    return found.peak.device_bytes


# -- what settings need is composed of few steps -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["{0-0}", "{0-2}"])
def test_some_recomputed_blocks_need_what_lies_between_none_and_all(tiny, monkeypatch, blocks):
    some = f'engine.recompute_modules=["predictor.blocks.{blocks}"]'
    mixed = study_of(tiny, "2xH100", *WIDE, some).forecast()
    monkeypatch.setattr(Study, "_recomputed", lambda *_: 0.0)
    whole = study_of(tiny, "2xH100", *WIDE, some).forecast()  # block by block
    assert peak(mixed) == pytest.approx(peak(whole), rel=0.01)
    assert sum(mixed.seconds.values()) == pytest.approx(sum(whole.seconds.values()), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["optimizer", "parameters", "activations"])
def test_a_part_on_the_host_is_a_part_less_on_the_device(tiny, part):
    study = study_of(tiny, "1xH100", *WIDE)
    key = f"engine.offload.{part}"
    composed = of_phases(study.config, _placed(study.plan, {key: "cpu"}), study.machine, study.phases())
    own = study_of(tiny, "1xH100", *WIDE, f"{key}=cpu").forecast()
    assert peak(composed) < peak(study.forecast())
    assert peak(composed) == pytest.approx(peak(own), rel=0.02)
    assert composed.peak.host_bytes == pytest.approx(own.peak.host_bytes, rel=0.02)
    assert composed.seconds["host copies"] == pytest.approx(own.seconds["host copies"], rel=0.15)
    assert not study.forecast().seconds["host copies"]


# -- the search --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_setting_needs_and_takes_what_its_own_forecast_shows(tiny):
    whole = peak(study_of(tiny, small(GIB), *WIDE).forecast())
    machine = small(0.9 * whole)
    found = search_of(tiny, machine, *WIDE).settings()
    assert len(found) >= 3
    assert [each.changes for each in found] == sorted(each.changes for each in found)
    for setting in found:
        own = study_of(tiny, machine, *WIDE, *setting.overrides).forecast()
        assert peak(own) <= machine.device.memory
        assert peak(setting.forecast) == pytest.approx(peak(own), rel=0.02)
    assert any("recompute" in word for setting in found for word in setting.overrides)


@pytest.mark.slow
def test_what_the_user_has_set_stays(tiny):
    whole = peak(study_of(tiny, small(GIB), *WIDE).forecast())
    keys = ("recompute_modules=[]", "offload_to_cpu=false", "compile.modules=false", "param_dtype=fp32")
    fixed = tuple(f"engine.{key}" for key in keys)
    found = search_of(tiny, small(0.92 * whole), *WIDE, fixed=(*fixed, WIDE[-1])).settings()
    assert not any(found)
    found = search_of(tiny, small(0.92 * whole), *WIDE, fixed=fixed).settings()
    assert found[0].overrides == ("train.micro_batch_size=2",)
    assert not {word.partition("=")[0] for each in found for word in each.overrides} & {
        word.partition("=")[0] for word in fixed
    }


@pytest.mark.slow
def test_where_there_is_room_a_micro_batch_is_larger_and_the_step_has_the_same_samples(tiny):
    found = search_of(tiny, "1x80GB", *WIDE).settings()
    assert "train.micro_batch_size=32" in found[0].overrides
    assert not any("offload" in word for word in found[0].overrides)


@pytest.mark.slow
def test_what_nothing_fits_is_told_with_what_lacks(tiny):
    search = search_of(tiny, "1x0.1GB", *WIDE)
    assert not search.settings()
    (line,) = shown([], search.machine, search.least)
    assert "no settings were found" in line and "are lacking" in line
    assert search.least > search.machine.device.memory * (1 - ROOM)


def test_an_engine_without_a_forecast_is_refused(tiny, monkeypatch):
    search = search_of(tiny, "1xH100", *WIDE)
    search.study.unknown = "only the model states are known"
    with pytest.raises(MMError, match="only the model states"):
        search.settings()


def test_a_setting_that_is_refused_is_not_kept_for_the_next_one(tiny):
    search, seen = search_of(tiny, "4xH100", *WIDE), []
    for values, _ in search._rungs():
        search._refused = "engine.context_parallel.size" in values
        seen.append(values)
    key = "engine.context_parallel.size"
    assert [values[key] for values in seen if key in values] == [2, 4]
    assert seen[-1]["engine.param_dtype"] == "bf16" and key not in seen[-1]
    assert {values.get("train.micro_batch_size") for values in seen} == {None, 2, 1}


def test_a_machine_without_a_known_memory_is_refused(tiny):
    with pytest.raises(MMError, match="4 x cpu has no memory"):
        search_of(tiny, "4xcpu", *WIDE).settings()


# -- the command -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_prints_settings_to_paste(tiny, mm):
    words = ("--config", tiny, "--dry-run", "--on", "1xH100", *WIDE, "engine.recompute_modules=[]")
    done = mm("train", *words, "--fit")
    assert done.code == 0, done.err
    assert "settings that fit 1 x H100, the fastest first" in done.out
    document = json.loads(mm("train", *words, "--fit", "--json").out)
    first = document["fit"][0]
    assert first["forecast"]["fits"] and isinstance(first["overrides"], list)


def test_settings_are_searched_in_a_dry_run(tiny, mm):
    done = mm("train", "--config", tiny, "--fit")
    assert done.code == 1 and "--fit works only with --dry-run" in done.err
