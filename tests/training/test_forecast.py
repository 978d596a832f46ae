"""The forecast of a run: its peaks are what ranks allocate, and a long model is composed of short ones."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from mm_core.config.load import load_config
from mm_core.device.machines import Machine, machine_of
from mm_core.errors import MMError, RunWarning
from mm_core.plan import build_task, plan_shown
from mm_core.training.forecast import composed
from mm_core.training.forecast.forecast import Forecast
from mm_core.training.forecast.meter import Meter, Work
from mm_core.training.forecast.seconds import REACHED, of_call
from mm_core.training.forecast.study import Study
from support.scripts import script

GIB = 2**30
LONG = ("task.predictor.num_layers=6", "data.train.annotations=absent.json")


def forecast_of(path, machine: str | Machine, *overrides: str) -> Forecast:
    config = load_config(path, overrides)
    on = machine_of(machine) if isinstance(machine, str) else machine
    plan, samples = plan_shown(config, on.world, build_task(config, {}))
    return Study(config, plan, on, samples, {}).forecast()


# -- memory ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "dit, activations on the host, average",
        "text, recomputed, chunked loss",
    ],
)
def test_the_predicted_peak_is_what_the_ranks_allocate(tmp_path, name):
    """Of one rank: what gloo's threads hold of several differs from run to run."""
    benchmark = script("benchmarks/plan.py")
    benchmark.prepare(tmp_path)
    case = next(each for each in benchmark.CASES if each.name == name)
    expected, measured = benchmark.predicted(case, tmp_path), benchmark.allocated(case, tmp_path)
    ratio = expected["training"] / measured["training"]
    assert abs(ratio - 1) <= (benchmark.BAR_OF_OTHERS if case.loose else benchmark.BAR)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [(), ("engine.recompute_modules=auto", "ema.decay=0.9")])
def test_a_model_composed_of_short_ones_needs_what_the_whole_needs(tiny, monkeypatch, sharded):
    found = []
    for short in (composed.SHORT, 100):
        monkeypatch.setattr(composed, "SHORT", short)
        found.append(forecast_of(tiny, "4xH100", *LONG, *sharded))
    assert found[0].needs == found[1].needs
    assert found[0].seconds == pytest.approx(found[1].seconds, rel=1e-9)
    short = forecast_of(tiny, "4xH100", *LONG, *sharded, "task.predictor.num_layers=3")
    assert short.peak.device_bytes < found[0].peak.device_bytes


@pytest.mark.slow
def test_a_model_that_counts_on_the_length_of_its_lists_is_computed_whole(tiny, monkeypatch):
    from mm_custom_dit.model import CustomDiT

    whole = forecast_of(tiny, "1xH100", *LONG)
    forward = CustomDiT.forward

    def counting(self, *args, **kwargs):
        assert len(self.blocks) == 6
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(CustomDiT, "forward", counting)
    assert forecast_of(tiny, "1xH100", *LONG).needs == whole.needs


def test_phases_are_those_that_the_run_has_with_the_data_and_encoders(tiny):
    validation = [
        "data.validation.type=video_text",
        "data.validation.annotations=${data.train.annotations}",
        *(f"data.validation.{name}=${{data.train.{name}}}" for name in ("num_frames", "height", "width")),
        "validation={samples: {prompts: [a red circle]}}",
    ]
    found = forecast_of(tiny, "1xcpu", *validation)
    assert [need.phase for need in found.needs] == ["load", "step", "evaluation", "sample"]
    assert not found.notes and not found.seconds
    alone = forecast_of(tiny, "1xcpu", *validation, "data.train.annotations=absent.json")
    assert [need.phase for need in alone.needs] == ["load", "step", "evaluation"]
    assert "encoders are not counted" in alone.notes[0]


@pytest.mark.parametrize("machine", ["1xH100", "8xH100"])
def test_states_on_the_host_are_not_on_the_device(tiny, machine):
    steps = (*LONG, "train.global_batch_size=16", "task.predictor.ffn_dim=16384")
    device = forecast_of(tiny, machine, *steps).peak
    host = forecast_of(tiny, machine, *steps, "engine.offload.optimizer=cpu").peak
    assert host.host_bytes > device.host_bytes == 0
    assert host.device_bytes < device.device_bytes
    assert "optimizer" in device.parts and not {"optimizer", "copies"} & host.parts.keys()


def test_the_peak_on_a_device_is_not_that_of_an_update_on_the_host(tiny):
    wide = (*LONG, "task.predictor.ffn_dim=65536", "engine.offload.parameters=cpu")
    load, step = forecast_of(tiny, "1xH100", *wide).needs
    assert "activations of predictor.blocks.*" in step.parts
    assert step.device_bytes > load.device_bytes


def test_weights_are_on_the_device_at_the_end_of_loading_with_an_optimizer_on_the_host(tiny):
    wide = (*LONG, "task.predictor.ffn_dim=65536", "engine.offload.optimizer=cpu")
    load = forecast_of(tiny, "1xH100", *wide).needs[0]
    assert load.device_bytes > load.parts["parameters"] + machine_of("1xH100").device.context


def test_the_optimizer_has_states_of_what_only_other_steps_train(tiny, monkeypatch):
    from mm_custom_dit.model import CustomDiT

    def states() -> int:
        return forecast_of(tiny, "1xH100", *LONG).needs[1].parts["optimizer"]

    before, init = states(), CustomDiT.__init__

    def with_another(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.another = torch.nn.Linear(1000, 1000)

    monkeypatch.setattr(CustomDiT, "__init__", with_another)
    assert states() == pytest.approx(before + 8 * 1_001_000, rel=1e-4)


def test_without_data_clips_of_many_sizes_have_that_of_the_largest_bucket(tiny):
    def needs(sizes: str, *more: str):
        one = f"data.train={{type: media_text, sources: [{{annotations: absent}}], num_frames: 4, {sizes}}}"
        found = forecast_of(tiny, "1xH100", one, "task.predictor.num_layers=9", *more)
        assert "encoders are not counted" in found.notes[0]
        return found.needs

    # 27 is no side that the patches divide; sides of the same area are.
    many = needs("max_height: 27, max_width: 32", "data.loader.mode=variable")
    assert many == needs("height: 36, width: 24")


def test_a_host_with_an_accelerator_forecasts_what_one_without_does(tiny, monkeypatch):
    without = forecast_of(tiny, "2xH100", *LONG)
    monkeypatch.setattr("mm_core.runtime.groups.device_type", lambda: "cuda")
    assert forecast_of(tiny, "2xH100", *LONG) == without


def test_what_a_device_lacks_is_the_peak_beyond_its_memory(tiny):
    found = forecast_of(tiny, "1x0.5GB", *LONG)  # its driver alone takes more
    assert found.lacking == found.peak.device_bytes - GIB // 2 > 0
    assert f"does not fit, by {found.lacking / 2**20:.1f} MiB, in: step" in "\n".join(found.render())
    assert "fits: " in "\n".join(forecast_of(tiny, "1x24GB", *LONG).render())


@pytest.mark.parametrize("needing", [lambda found: found[found > 0], lambda found: found.detach().numpy()])
def test_a_forward_that_needs_numbers_leaves_the_model_states(needing, tiny, monkeypatch):
    from mm_custom_dit.model import CustomDiT

    forward = CustomDiT.forward

    def choosing(self, *, latents, **kwargs):
        needing(latents)
        return forward(self, latents=latents, **kwargs)

    monkeypatch.setattr(CustomDiT, "forward", choosing)
    found = forecast_of(tiny, "2xH100", *LONG)
    assert [need.phase for need in found.needs] == ["states"]
    assert "unknown: predictor stopped" in found.notes[0]
    assert not dist.is_initialized()


def test_a_forward_that_cannot_work_is_a_warning(tiny, monkeypatch):
    from mm_custom_dit.model import CustomDiT

    def broken(self, *, latents, **kwargs):
        raise RuntimeError("the input has the wrong shape")

    monkeypatch.setattr(CustomDiT, "forward", broken)
    warned = r"without numbers stopped: RuntimeError: .*; it will probably stop there, too"
    with pytest.warns(RunWarning, match=warned):
        found = forecast_of(tiny, "2xH100", *LONG)
    assert [need.phase for need in found.needs] == ["states"]
    assert "unknown: predictor stopped" in found.notes[0]


@pytest.mark.slow
def test_nothing_is_allocated_for_a_model_of_a_hundred_gibibytes(tiny):
    wide = (
        "train.global_batch_size=16",
        "task.predictor.num_layers=80",
        "task.predictor.head_dim=4096",
        "task.predictor.ffn_dim=32768",
    )
    before = torch.get_num_threads()
    found = forecast_of(tiny, "8xB200", *LONG, *wide)
    assert found.peak.parts["optimizer"] > 20 * GIB
    assert torch.get_num_threads() == before and not dist.is_initialized()


def test_storages_count_from_their_operator_to_their_release():
    meter = Meter()
    with meter.phase("step"), meter.counting():
        first = torch.ones(1000)
        meter.enter("second")
        with meter.making("named"):
            second = first * 2
        view = second.view(10, 100)
        del second
        meter.call([first], "first")
        del first
        meter.enter("third")
        third = torch.zeros(10)
        view.untyped_storage().resize_(0)
        meter.enter("fourth")
        third.add_(1)
    peaks = {name: segment.peak for name, segment in meter.phases["step"].items()}
    assert peaks == {"begin": 4000, "second": 8000, "third": 4040, "fourth": 40}
    assert meter.parts(meter.phases["step"]["second"].at) == {"first": 4000, "named": 4000}


# -- seconds -----------------------------------------------------------------------------------------


def test_an_operator_takes_what_limits_it():
    machine = machine_of("2x8xH100")
    device = machine.device
    large = Work("matmul", "mm", "bfloat16", 10**15, 10**6)
    assert of_call(large, machine) == pytest.approx(1e15 / (REACHED["matmul"] * device.bf16))
    wide = Work("elementwise", "add", "bfloat16", 0, 10**12)
    assert of_call(wide, machine) == pytest.approx(1e12 / (REACHED["elementwise"] * device.bandwidth))
    assert of_call(large._replace(dtype="float32"), machine) > 10 * of_call(large, machine)


def test_a_collective_takes_the_links_between_its_ranks():
    machine = machine_of("2x8xH100")
    device, share = machine.device, REACHED["communication"]
    within = Work("communication", "_allgather_base_", "bfloat16", 0, 10**10, group=8, span=8)
    assert of_call(within, machine) == pytest.approx(1e10 * 7 / 8 / (share * device.link) + 7 * 2e-6)
    across = within._replace(group=2, span=9)  # one rank of each host
    assert of_call(across, machine) == pytest.approx(1e10 / 2 / (share * device.network) + 1e-5)
    everywhere = within._replace(group=16, span=16)  # each host's ranks share its network cards
    moved = 1e10 * 15 / 16 / (share * 8 * device.network)
    assert of_call(everywhere, machine) == pytest.approx(moved + 7 * 2e-6 + 1e-5)
    assert of_call(within._replace(group=1, span=1), machine) == 0


@pytest.mark.slow
def test_a_step_has_the_flops_of_the_plan(tiny):
    config = load_config(tiny, [*LONG, "train.global_batch_size=2"])
    plan, _ = plan_shown(config, 1, build_task(config, {}))
    counts: Counter[str] = Counter()
    original = composed.counted_whole

    def seen(rank, calls):
        phases = original(rank, calls)
        for segment in phases["step"].values():
            for work, count in segment.work.items():
                # The plan's backward is two forwards; that of attention computes the scores again.
                again = work.kind == "attention" and "backward" in work.name
                counts["all"] += work.flops * count * (0.8 if again else 1)
        return phases

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composed, "counted_whole", seen)
        patch.setattr(composed, "SHORT", 100)
        Study(config, plan, machine_of("1xH100"), None, {}).forecast()
    assert counts["all"] == pytest.approx(plan.flops.forward + plan.flops.backward, rel=0.01)


# -- the command -------------------------------------------------------------------------------------


def test_the_command_prints_the_forecast_for_a_machine(tiny, mm):
    words = ("data.train.annotations=absent.json", "train.global_batch_size=16")
    done = mm("train", "--config", tiny, "--dry-run", "--on", "2x4xH100", *words)
    assert done.code == 0, done.err
    assert "forecast for 2 hosts of 4 x H100, per rank" in done.out
    assert "plan of run 'tiny': 8 ranks" in done.out and "samples a day" in done.out
    own = mm("train", "--config", tiny, "--dry-run", "--on", "1x24GB", "--json")
    document = json.loads(own.out)["forecast"]
    assert document["fits"] and document["step_seconds"] == 0
    assert {"load", "step"} == {need["phase"] for need in document["needs"]}


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("--dry-run", "--on", "3xFOO"), ("the device 'FOO' is not known", "H100", "910B")),
        (("--dry-run", "--on", "1x24"), ("not known", "1x24GB")),
        (("--dry-run", "--on", "H100"), ("is not a machine", "RANKSxDEVICE")),
        (("--dry-run", "--on", "0xH100"), ("is not a machine",)),
        (("--on", "8xH100"), ("it works with --dry-run",)),
        (("--dry-run", "--on", "8xH100", "--nproc", "2"), ("without --nproc",)),
    ],
)
def test_a_machine_that_is_none_is_an_error(tiny, mm, words, texts):
    done = mm("train", "--config", tiny, *words)
    assert done.code == 1
    assert all(text in done.err for text in texts), done.err


@pytest.mark.parametrize("text", ["8xh100", "8xH100", "1x8xH100", "8x NVIDIA H100"])
def test_a_machine_is_read_as_people_write_it(text):
    machine = machine_of(text)
    assert (machine.world, machine.device.name, machine.device.timed) == (8, "H100", True)
    assert machine_of("8xAscend 910B").device.name == "910B"
    assert machine_of("1x24 GB").device.memory == machine_of("1x24GiB").device.memory == 24 * GIB


def test_a_machine_of_no_ranks_is_an_error():
    for text in ("0x8xH100", "8x", "x", ""):
        with pytest.raises(MMError, match=r"is not a machine|not known"):
            machine_of(text)
