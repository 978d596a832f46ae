"""The conformance kit of callbacks: shipped ones pass, and faulty ones are refused."""

from __future__ import annotations

import random

import pytest
import torch

from mm_core.contracts import Callback
from support.conformance import examined, refusal, shortcomings


def test_the_shipped_callback_keeps_its_contract() -> None:
    assert shortcomings("core/command") == []


class Marking(Callback):
    """It keeps a file of its own, and the last step."""

    def run_started(self, run_dir, step, last_step):
        self.path = run_dir / "marked.txt"

    def step_ended(self, step, metrics):
        self.path.write_text(str(step))

    def run_ended(self, step, error):
        with self.path.open("a") as file:
            file.write(f"{step} {error!r}")


def test_one_that_writes_a_file_of_its_own_passes() -> None:
    outcomes = list(examined("core/command", Marking, tiny={}, config=None))
    assert [(o.check, o.reason) for o in outcomes if o.status == "failed"] == []


class Timing(Callback):
    """It reads the run's config, and takes the time of each step from the step before."""

    def run_started(self, run_dir, step, last_step):
        self.config, self.last = (run_dir / "config.yaml").read_text(), step

    def step_ended(self, step, metrics):
        self.share = 1 / (step - self.last)
        self.last = step


def test_one_that_counts_on_the_order_of_a_run_passes() -> None:
    outcomes = list(examined("core/command", Timing, tiny={}, config=None))
    assert [(o.check, o.reason) for o in outcomes if o.status == "failed"] == []


class Logged(Callback):
    def step_ended(self, step, metrics):
        self.loss = metrics["loss"]


class Renaming(Callback):
    def run_started(self, run_dir, step, last_step):
        (run_dir / "started").mkdir()


class First(Callback):
    """It reads in a resumed run what it has noted at the beginning."""

    def run_started(self, run_dir, step, last_step):
        if step == 0:
            self.began = run_dir

    def saved(self, step, path):
        (self.began / "saved.txt").write_text(str(path))


class Reporting(Callback):
    def run_ended(self, step, error):
        if error is not None:
            error.args[0].upper()


class Raising(Callback):
    def run_ended(self, step, error):
        if isinstance(error, Exception):
            raise error


class Rounded(Callback):
    def validated(self, step, metrics):
        self.loss = int(1000 * metrics.get("loss", 0))


class Drawing(Callback):
    def step_ended(self, step, metrics):
        self.shown = random.random()


class Seeding(Callback):
    def saved(self, step, path):
        torch.manual_seed(step)


class Popping(Callback):
    def validated(self, step, metrics):
        metrics.pop("validation/loss", None)


class Cleaning(Callback):
    def saved(self, step, path):
        (path / "checksums.json").unlink()


class Overlaid(Callback):
    def sampled(self, step, folder):
        for path in folder.glob("*.mp4"):
            path.write_bytes(b"")


FAULTS = [
    (Logged, "TypeError: 'NoneType' object is not subscriptable"),
    (Renaming, "FileExistsError: "),
    (First, "AttributeError: 'First' object has no attribute 'began'"),
    (Reporting, "IndexError: tuple index out of range"),
    (Raising, "RuntimeError: "),
    (Rounded, "ValueError: cannot convert float NaN to integer"),
    (Drawing, "step_ended changes the generator of `random`"),
    (Seeding, "saved changes torch's default generator"),
    (Popping, "validated changes the metrics that it is given"),
    (Cleaning, "saved changes the run's file checkpoints/step_00000002/checksums.json"),
    (Overlaid, "sampled changes the run's file samples/step_00000002/000"),
]


@pytest.mark.parametrize(("faulty", "sentence"), FAULTS)
def test_a_faulty_one_is_refused(faulty: type, sentence: str) -> None:
    kept = torch.get_rng_state(), random.getstate()
    try:
        reason = refusal("core/command", "observes", faulty, tiny={}, config=None)
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
    assert sentence in reason, reason
    assert __file__ in reason, "it names the author's file"


def test_a_misspelt_event_is_refused() -> None:
    class Misspelt(Callback):
        def on_steps_end(self, step, metrics):
            raise AssertionError

    reason = refusal("core/command", "resolves", Misspelt, tiny={}, config=None)
    assert "is not an event and is never called: did you mean step_ended?" in reason
    assert "its method on_steps_end (line " in reason


def test_a_method_that_the_loop_cannot_call_is_refused() -> None:
    class Short(Callback):
        def step_ended(self, step):
            raise AssertionError

    reason = refusal("core/command", "resolves", Short, tiny={}, config=None)
    assert "its method step_ended(step) (line " in reason
    assert "cannot be called as step_ended(step, metrics), as the core calls it" in reason
