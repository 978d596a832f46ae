"""The loader: the plan's batches, the same whatever reads them, and an error for what goes wrong."""

from __future__ import annotations

import ctypes
import inspect
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_core.contracts import Batch, DataRanks, FailureRecord, Randomness, SampleKey
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.loading.loader import CodeError, MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan, Order, SlotSpec
from mm_core.data.loading.skipped import SkipLedger, UnreadableError
from mm_core.data.media.limits import decoding
from mm_core.errors import ContractError, DataError, PartsError, RunWarning
from mm_core.plugin.local import import_file, module_name, read_local
from support import ranks, warm
from support.validation import Clips


class Numbers:
    """Sample i is the number i plus random draws of its own generator and the process's; the indices in `bad`
    cannot be read."""

    def __init__(self, size: int, bad: tuple[int, ...] = (), fault: Exception | None = None) -> None:
        self.size, self.bad, self.fault = size, bad, fault

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.sample_at(index, Randomness(0))

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        if index in self.bad:
            raise self.fault or DataError("it is broken", where=f"n/{index}")
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {"value": index + rng.uniform("x"), "id": f"n/{index}", "drawn": drawn}

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        batch = Batch(
            keys=[sample["key"] for sample in samples],
            sample_weights=torch.tensor([sample["weight"] for sample in samples]),
            ids=[sample["id"] for sample in samples],
        )
        batch.values = torch.tensor([sample["value"] for sample in samples], dtype=torch.float64)
        batch.drawn = [*(sample.get("drawn") for sample in samples), random.random()]
        return batch


class Stuck(Numbers):
    """Kills its own worker at one sample."""

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        if index in self.bad:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample_at(index, rng)


class Hangs(Numbers):
    """Never comes back from some samples: in one call of C, which no thread of the process outlives."""

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        with decoding(f"n/{index}"):
            if index in self.bad:
                ctypes.PyDLL(None).sleep(3600)
        return super(Hangs, Hangs(self.size)).sample_at(index, rng)


def upper(batch: Batch) -> Batch:
    batch.ids = [name.upper() for name in batch.ids]
    return batch


def explode(batch: Batch) -> Batch:
    raise KeyError("token")


def refuse(batch: Batch) -> Batch:
    raise ContractError("captions are missing")


def loader(
    dataset: Any,
    plan: Any = None,
    *,
    batch_transform: Any = None,
    rng: Randomness | None = None,
    rank: int = 0,
    data_parallel: int = 1,
    start_step: int = 0,
    end_step: int = 6,
    device_type: str = "cpu",
    **settings: Any,
) -> MicroBatchLoader:
    plan = plan or BatchPlan(len(dataset), 2, 4, 0, "random", True)
    return MicroBatchLoader(
        dataset,
        plan,
        batch_transform=batch_transform,
        rng=rng or Randomness(plan.seed),
        share=DataRanks(rank, data_parallel),
        steps=range(start_step, end_step),
        **{"workers": 0, "prefetch": 2, "pin_memory": True, **settings},
        device_type=device_type,
    )


def content(batches: Any) -> list[tuple[Any, ...]]:
    return [
        (b.keys, b.ids, b.sample_weights.tolist(), b.values.tolist(), b.drawn, b.failures) for b in batches
    ]


def test_the_loader_yields_the_plans_micro_batches_in_order() -> None:
    plan = BatchPlan(10, 2, 4, 3, "random", False)
    got = loader(Numbers(10), plan)
    batches = list(got)
    assert len(got) == len(batches) == 12 and got.per_step == 2
    wanted = [micro for step in range(6) for micro in plan.micro_batches(step, 0, 1)]
    assert [batch.keys for batch in batches] == [[row.key for row in micro] for micro in wanted]
    assert [batch.sample_weights.tolist() for batch in batches] == [
        [row.weight for row in micro] for micro in wanted
    ]
    assert all(batch.ids == [f"n/{key.index}" for key in batch.keys] for batch in batches)


@pytest.mark.slow
def test_content_does_not_depend_on_who_reads() -> None:
    dataset = Numbers(11, bad=(4, 7))
    plan = BatchPlan(11, 2, 4, 0, "random", False)
    reference = content(loader(dataset, plan))
    assert any(row[5] for row in reference), "there are replacements"
    for workers, prefetch in ((1, 1), (2, 3)):
        assert content(loader(dataset, plan, workers=workers, prefetch=prefetch)) == reference
    assert content(loader(dataset, plan, start_step=4)) == reference[8:], "a resumed run needs no state"
    ranks = [content(loader(dataset, plan, rank=rank, data_parallel=2)) for rank in (0, 1)]
    assert [row for pair in zip(*ranks, strict=True) for row in pair] == reference


def test_random_draws_belong_to_the_epoch_and_the_sample() -> None:
    batches = list(loader(Numbers(4), end_step=2))
    values = {key: value for b in batches for key, value in zip(b.keys, b.values.tolist(), strict=True)}
    assert values[(0, 1)] == 1 + Randomness(0).at("data", 0, 1).uniform("x")
    assert values[(0, 1)] != values[(1, 1)]


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(loader(Numbers(8), workers=1))
    assert torch.equal(torch.rand(3), expected)


def test_the_batch_transform_runs_after_collate() -> None:
    assert next(iter(loader(Numbers(8), batch_transform=upper))).ids[0].startswith("N/")


def test_an_unreadable_sample_is_replaced_and_reported() -> None:
    batches = list(loader(Numbers(8, bad=(3,)), end_step=2))
    failed = [failure for batch in batches for failure in batch.failures]
    assert [(failure.id, failure.index, failure.reason) for failure in failed] == [("n/3", 3, "it is broken")]
    (batch,) = [batch for batch in batches if batch.failures]
    place = [key.index for key in batch.keys].index(3)
    assert batch.ids[place] != "n/3" and batch.sample_weights[place] == 1, (
        "the key stays, the sample is another"
    )


def test_replacements_are_found_while_any_sample_of_a_small_set_is_readable() -> None:
    batches = list(loader(Numbers(4, bad=(0, 1, 2)), end_step=2))
    assert {name for batch in batches for name in batch.ids} == {"n/3"}


@dataclass(frozen=True)
class TwoShapes:
    """An order of samples of two shapes: a step reads twice 3 even samples, then twice 1 odd one."""

    samples: int
    seed: int
    batches_per_epoch: int = 4

    def micro_batches(self, step: int, rank: int, data_parallel: int) -> list[list[SlotSpec]]:
        found = []
        for micro in range(rank, 4, data_parallel):
            members = torch.arange(micro // 2, self.samples, 2)
            drawn = torch.randperm(len(members), generator=Randomness(self.seed).generator(step, micro))
            rows = members[drawn[: 1 if micro // 2 else 3]].tolist()
            found.append([SlotSpec(SampleKey(step, row), 1.0) for row in rows])
        return found

    def replacements(self, key: SampleKey) -> Iterator[int]:
        return iter([other for other in range(key.index % 2, self.samples, 2) if other != key.index])

    def facts(self) -> dict[str, object]:
        return asdict(self)


class Sides(Numbers):
    """Samples whose values have the shape [4] or [9], which are stacked."""

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        sample = super().sample_at(index, rng)
        return sample | {"value": torch.full((9 if index % 2 else 4,), sample["value"])}

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        values = torch.stack([sample["value"] for sample in samples])
        batch = super().collate([{**sample, "value": 0} for sample in samples])
        batch.values = values
        return batch


def test_an_order_has_micro_batches_of_other_sizes_and_replaces_samples_by_those_of_their_shape() -> None:
    order: Order = TwoShapes(12, 5)
    dataset = Sides(12, bad=(0, 1, 2, 5))
    batches = list(loader(dataset, order))
    assert [batch.values.shape for batch in batches] == [(3, 4), (3, 4), (1, 9), (1, 9)] * 6
    replaced = {
        (key.index, int(name[2:]))
        for batch in batches
        for key, name in zip(batch.keys, batch.ids, strict=True)
        if name != f"n/{key.index}"
    }
    assert replaced == {(0, 4), (2, 4), (1, 3), (5, 3)}, "by the first readable one of the group"
    assert {f.index for batch in batches for f in batch.failures} == {0, 1, 2, 5}
    whole = content(batches)
    assert content(loader(dataset, order, workers=2)) == whole, "read by workers"
    assert content(loader(dataset, order, start_step=4)) == whole[16:], "any step first"
    for count in (2, 4):
        ranks = [content(loader(dataset, order, rank=rank, data_parallel=count)) for rank in range(count)]
        assert [batch for share in zip(*ranks, strict=True) for batch in share] == whole, f"{count} ranks"
    with pytest.raises(UnreadableError, match=r"sample \d+ and 5 others tried"):
        list(loader(Sides(12, bad=(1, 3, 5, 7, 9, 11)), order))


@pytest.mark.slow
def test_samples_grouped_by_length_come_from_workers_as_from_here() -> None:
    plan = BatchPlan(64, 2, 4, 0, "random", False, lengths=torch.arange(64) % 7)
    dataset = Numbers(64, bad=(3, 40))
    assert content(loader(dataset, plan, workers=2, end_step=16)) == content(
        loader(dataset, plan, end_step=16)
    )


class Pairs(Numbers):
    """Sample i is the numbers 2i and 2i + 1, without those in `bad`."""

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        own = (2 * index, 2 * index + 1)
        faults = {n: DataError("it is broken", where=f"n/{n}") for n in own if n in self.bad}
        if len(faults) == 2:
            raise PartsError(faults, 2)
        kept = sum(n for n in own if n not in faults)
        return {"value": kept, "id": f"n/{index}", **({"missing": PartsError(faults, 2)} if faults else {})}

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        assert not any("missing" in sample for sample in samples)
        return super().collate(samples)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_does_without_its_unreadable_parts(workers: int) -> None:
    plan = BatchPlan(4, 2, 4, 0, "sequential", False)
    first, second = loader(Pairs(4, bad=(2, 6, 7)), plan, end_step=1, workers=workers)
    assert first.values.tolist() == [1, 3] and first.ids == ["n/0", "n/1"], "1 is 3 without its 2"
    assert first.failures == [FailureRecord("n/2", 1, "it is broken", 2, 2, replaced=False)]
    assert second.ids[1] != "n/3", "nothing is left of it"
    lost = [(failure.index, failure.part) for failure in second.failures if failure.replaced]
    assert lost == [(3, 6), (3, 7)]


@pytest.mark.parametrize("workers", [0, 1])
def test_when_nothing_can_be_read_the_run_stops_and_the_ledger_lists_it(tmp_path: Path, workers: int) -> None:
    ledger = SkipLedger(tmp_path, 0.5)
    with pytest.raises(UnreadableError, match="others tried in its place could not be read: n/") as caught:
        list(ledger.watch(loader(Numbers(4, bad=(0, 1, 2, 3)), workers=workers)))
    assert "skipped.jsonl" in str(caught.value.hint) and "annotation" not in str(caught.value.hint)
    assert (tmp_path / "skipped.jsonl").read_text().count("\n") == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_in_a_datasets_code_is_not_skipped(workers: int) -> None:
    dataset = Numbers(8, bad=(2,), fault=ZeroDivisionError("float division by zero"))
    with pytest.raises(CodeError, match="sample 2 raised ZeroDivisionError: float division") as caught:
        list(loader(dataset, workers=workers))
    line = inspect.getsourcelines(Numbers.sample_at)[1] + 2
    assert caught.value.where == f"{__file__}, line {line}" and "MM_DEBUG" in str(caught.value.hint)
    assert "sample_at" in str(caught.value.__cause__), "the worker's traceback is kept"
    with pytest.raises(CodeError, match="the task's batch transform raised KeyError: 'token'"):
        list(loader(Numbers(8), workers=workers, batch_transform=explode))
    with pytest.raises(ContractError, match="captions are missing"):
        list(loader(Numbers(8), workers=workers, batch_transform=refuse))


class Scaled(Clips):
    """Clips of noise whose sample 2 is scaled, as where `/ 127.5 - 1` was forgotten."""

    factor = 1.0

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if self.factor == 0:
            return sample | {"pixels": (sample["pixels"] * 100).byte()}
        return sample | {"pixels": sample["pixels"] * self.factor} if index == 2 else sample


@pytest.mark.parametrize(
    ("factor", "said"),
    [(500.0, r"are from -[1-9][0-9]+ to [1-9][0-9]+"), (float("nan"), "are from nan to nan")],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_pixels_outside_their_range_are_an_error_of_the_dataset(
    workers: int, factor: float, said: str
) -> None:
    dataset = Scaled(8)
    assert len(list(loader(dataset, workers=workers))) == 12
    dataset.factor = factor
    with pytest.raises(CodeError, match=f"the pixels of sample clip 2 {said}") as caught:
        list(loader(dataset, workers=workers))
    line = inspect.getsourcelines(Scaled)[1]
    assert caught.value.where == f"Scaled, {__file__}, line {line}"
    assert "/ 127.5 - 1" in str(caught.value.hint)


class Unit(Clips):
    """Clips from 0 to 1, but for `dark`."""

    dark = -1

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return sample if index == self.dark else sample | {"pixels": sample["pixels"].add(1).div(2)}


@pytest.mark.parametrize("workers", [0, 1])
def test_clips_from_0_to_1_are_a_warning_that_names_the_range(workers: int) -> None:
    plan = BatchPlan(8, 1, 2, 0, "sequential", True)
    with pytest.warns(RunWarning, match="the pixels of its first clips are from 0 to 1: -1 is black") as seen:
        assert len(list(loader(Unit(8), plan, workers=workers))) == 12
    assert len(seen) == 1
    assert str(seen[0].message).startswith(f"Unit, {__file__}, line {inspect.getsourcelines(Unit)[1]}: ")
    for dark in (0, 1):  # one bright clip is no sign
        dataset = Unit(8)
        dataset.dark = dark
        assert len(list(loader(dataset, plan, workers=workers))) == 12


def test_a_worker_that_dies_is_a_readable_error() -> None:
    with pytest.raises(DataError, match="a data worker") as caught:
        list(loader(Stuck(8, bad=(2,)), workers=1))
    assert "lower data.loader.workers" in str(caught.value.hint)


@pytest.mark.slow
def test_a_decoder_that_hangs_is_replaced_as_an_unreadable_sample_is() -> None:
    """From the micro-batch on that is missing, within a step too; the third time costs nothing."""
    hangs = loader(Hangs(12, bad=(4, 9)), workers=2, decode_seconds=3.0, end_step=8)
    read = [*hangs, *hangs]
    expected = [*loader(Numbers(12, bad=(4, 9)), end_step=8)] * 2
    assert [batch.ids for batch in read] == [batch.ids for batch in expected]
    assert [batch.drawn for batch in read] == [batch.drawn for batch in expected]
    failures = [[(one.id, one.index) for one in batch.failures] for batch in read]
    assert failures == [[(one.id, one.index) for one in batch.failures] for batch in expected]
    assert {one.reason for batch in read for one in batch.failures} == {"the decoder did not end within 3 s"}


def test_workers_ignore_signals_to_the_group_and_end_with_the_iterator() -> None:
    batches = iter(loader(Numbers(40), end_step=10, workers=2, prefetch=1))
    first = next(batches)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGUSR1)
    rest = list(batches)
    assert len(rest) == 19 and first.keys
    began = time.perf_counter()
    unfinished = iter(loader(Numbers(40), end_step=10, workers=2))
    next(unfinished)
    unfinished.close()
    del unfinished
    while multiprocessing.active_children() and time.perf_counter() - began < 5:
        time.sleep(0.01)
    assert not multiprocessing.active_children()


def run_script(tmp_path: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """A script of a user's, in which this module is `t`."""
    script = tmp_path / "script.py"
    here = ["import sys", f"sys.path.insert(0, {str(Path(__file__).parent)!r})", "import test_loader as t"]
    script.write_text("\n".join([*here, *lines]) + "\n")
    return warm.run([script], env=ranks.environment(), timeout=60)


@pytest.mark.slow
def test_a_process_that_leaves_with_its_workers_alive_does_not_hang(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        "if __name__ == '__main__':",
        "    kept = iter(t.loader(t.Numbers(40), workers=2))",
        "    next(kept)",
        "    sys.kept = kept",  # survives until after the exit handlers
        "    raise SystemExit(3)",
    )
    assert done.returncode == 3, done.stderr


def test_the_name_of_the_script_is_left_as_it_was() -> None:
    script = sys.modules["__main__"]
    before = dict(vars(script))
    iter(loader(Numbers(8), workers=1)).close()
    assert {name: vars(script).get(name, "none") for name in ("__file__", "__spec__")} == {
        name: before.get(name, "none") for name in ("__file__", "__spec__")
    }


@pytest.mark.slow
def test_a_plain_script_may_train(tmp_path: Path) -> None:
    """Workers import it only where they must, and then the error names what it lacks."""
    done = run_script(tmp_path, "print('began', len(list(t.loader(t.Numbers(8), workers=2))))")
    assert (done.returncode, done.stdout) == (0, "began 12\n"), done.stderr
    own = (
        "class Mine(t.Numbers): pass",
        "if {guard}:",
        "    print('began', len(list(t.loader(Mine(8), workers=1))))",
    )
    done = run_script(tmp_path, *"\n".join(own).format(guard="__name__ == '__main__'").split("\n"))
    assert (done.returncode, done.stdout) == (0, "began 12\n"), done.stderr
    done = run_script(tmp_path, *"\n".join(own).format(guard="True").split("\n"))
    assert done.returncode == 1 and "a data worker ended unexpectedly" in done.stderr
    assert 'put the script\'s own work under `if __name__ == "__main__":`' in done.stderr


def test_a_dataset_that_cannot_be_sent_to_a_worker_is_a_readable_error() -> None:
    dataset = Numbers(8)
    with Path(__file__).open() as opened:
        dataset.opened = opened  # type: ignore[attr-defined]
        with pytest.raises(DataError, match="cannot be sent to a data worker: cannot pickle") as caught:
            iter(loader(dataset, workers=1))
    assert caught.value.where == "Numbers" and "opened on first use" in str(caught.value.accepted)
    assert "data.loader.workers=0" in str(caught.value.hint)


def test_datasets_of_one_file_plugins_reach_workers(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_loader import Numbers\nclass Mine(Numbers):\n    pass\n"
    )
    module = import_file(read_local(file), module_name(file, "1"))
    assert len(content(loader(module.Mine(8), workers=2))) == 12


def test_workers_are_not_forked_from_the_training_process() -> None:
    """A lock that one of its threads holds at a fork would be held for ever in the worker."""
    batches = iter(loader(Numbers(8), workers=1))
    (worker,) = multiprocessing.active_children()
    parent = int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != os.getpid()
    batches.close()


def test_videos_through_workers_equal_videos_read_here(shapes_data: Path) -> None:
    dataset = VideoTextDataset(shapes_data / "data.json", 8, 16, 16)
    plan = BatchPlan(len(dataset), 4, 8, 1, "random", True)
    here = list(loader(dataset, plan, end_step=3))
    there = list(loader(dataset, plan, end_step=3, workers=2))
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.pixels, other.pixels) and one.captions == other.captions
        assert one.keys == other.keys and one.pixels.shape == (4, 3, 8, 16, 16)


def test_bad_videos_among_good_ones_are_skipped_counted_and_listed(
    tmp_path: Path, shapes_data: Path, encode_audio, annotate
) -> None:
    import json

    rows = json.loads((shapes_data / "data.json").read_text())[:30]
    (tmp_path / "videos").mkdir()
    for row in rows:
        (tmp_path / row["path"]).write_bytes((shapes_data / row["path"]).read_bytes())
    paths = [tmp_path / row["path"] for row in rows[:4]]
    paths[0].unlink()
    paths[1].write_bytes(b"")
    paths[2].write_bytes(paths[2].read_bytes()[:600])
    encode_audio(paths[3])
    dataset = VideoTextDataset(annotate(tmp_path / "data.json", rows), 8, 16, 16)
    plan = BatchPlan(30, 5, 5, 0, "sequential", True)
    ledger = SkipLedger(tmp_path / "run", 0.2)
    batches = list(ledger.watch(loader(dataset, plan, end_step=12, workers=1)))
    assert len(batches) == 12 and (ledger.failed, ledger.seen) == (4, 30)
    entries = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    entries.sort(key=lambda entry: entry["index"])  # a bad file may be met in place of another first
    assert [entry["index"] for entry in entries] == [0, 1, 2, 3]
    assert [entry["id"] for entry in entries] == [str(path) for path in paths]
    reasons = ["does not exist", "0 bytes", "not a readable video", "no video stream"]
    assert all(reason in entry["reason"] for reason, entry in zip(reasons, entries, strict=True))
    strict = SkipLedger(tmp_path / "strict", 0.1)
    with pytest.raises(DataError, match=r"4 of \d+ samples could not be read"):
        list(strict.watch(loader(dataset, plan, end_step=12)))
