"""The conformance kit of trackers: shipped ones pass, and each check refuses a faulty one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mm_core.plugin.registry import get_registry
from mm_core.telemetry.trackers.local import JsonlTracker
from mm_core.testing.small_kinds import TRACKER
from support.conformance import examined, refusal, shortcomings

SHIPPED = [each.qualified for each in get_registry().components("tracker")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_trackers_keep_their_contract(name: str) -> None:
    assert shortcomings(name) == []


def test_a_missing_package_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    outcomes = list(examined("core/wandb"))
    assert [o.reason for o in outcomes if o.status == "failed"] == []
    (built,) = (o for o in outcomes if o.check == "builds")
    assert (built.status, built.reason) == ("not applicable", "wandb is not installed")


class PerStep(JsonlTracker):
    """It reads the run's config, and divides by the step, which is 1 or more."""

    def log(self, step, metrics):
        assert (self.folder / "config.yaml").read_text()
        super().log(step, {**metrics, "loss_per_step": metrics["loss"] / step})

    def __init__(self, run_dir):
        super().__init__(run_dir)
        self.folder = Path(run_dir)


@pytest.mark.parametrize("check", ["whole_run", "resumes"])
def test_one_that_counts_on_what_a_run_has_passes(check: str) -> None:
    outcome = examined("core/jsonl", PerStep).run(check)
    assert outcome.status == "passed", outcome.reason


class Finite(JsonlTracker):
    def log(self, step, metrics):
        json.dumps(dict(metrics), allow_nan=False)
        super().log(step, metrics)


class Ascii(JsonlTracker):
    def log(self, step, metrics):
        "".join(metrics).encode("ascii")
        super().log(step, metrics)


class Files(JsonlTracker):
    def clips(self, step, clips, folder):
        for path in (folder / f"{number:03d}.mp4" for number in range(len(clips))):
            path.stat()


class Succeeding(JsonlTracker):
    def close(self, ending):
        self.state = {"done": 0, "failed": 1}[ending]
        super().close(ending)


class Buffered(JsonlTracker):
    def __init__(self, run_dir):
        super().__init__(run_dir)
        self.file = (Path(run_dir) / "metrics.txt").open("a")

    def log(self, step, metrics):
        self.file.write(f"{step} {dict(metrics)}\n")

    def close(self, ending):
        self._file.close()


class Once(JsonlTracker):
    def close(self, ending):
        self._file.write(b"")
        super().close(ending)


class Truncating(JsonlTracker):
    def __init__(self, run_dir):
        super().__init__(run_dir)
        self._file.truncate(0)


class Repeating(JsonlTracker):
    """It copies what was logged before into a new file."""

    def __init__(self, run_dir):
        super().__init__(run_dir)
        path = Path(run_dir) / "metrics.jsonl"
        if path.stat().st_size:
            (Path(run_dir) / "all.jsonl").write_bytes(path.read_bytes())


class Deaf(JsonlTracker):
    """It logs nothing in a run that was resumed."""

    def __init__(self, run_dir):
        super().__init__(run_dir)
        self.resumed = (Path(run_dir) / "metrics.jsonl").stat().st_size > 0

    def log(self, step, metrics):
        if not self.resumed:
            super().log(step, metrics)


class Working(JsonlTracker):
    def log(self, step, metrics):
        super().log(step, metrics)
        Path("last_step.txt").write_text(str(step))


class Popping(JsonlTracker):
    def log(self, step, metrics):
        metrics.pop("validation/loss", None)
        super().log(step, metrics)


class Inverting(JsonlTracker):
    def clips(self, step, clips, folder):
        for clip in clips:
            clip.pixels.neg_()


FAULTS = [
    ("whole_run", Succeeding, "KeyError: 'stopped'"),
    ("whole_run", Finite, "ValueError: Out of range float values"),
    ("whole_run", Ascii, "UnicodeEncodeError: "),
    ("whole_run", Files, "FileNotFoundError: "),
    ("whole_run", Once, "ValueError: "),
    ("whole_run", Popping, "the tracker changes the metrics or clips that it is given"),
    ("whole_run", Inverting, "the tracker changes the metrics or clips that it is given"),
    ("resumes", Buffered, "after a resume, the numbers of steps [5, 6] are not in the files"),
    ("resumes", Truncating, "after a resume, the numbers of steps [1, 2, 3, 4] are not in the files"),
    ("resumes", Repeating, "after a resume, the numbers of steps [1, 2, 3, 4] are logged again"),
    ("resumes", Deaf, "after a resume, the numbers of steps [5, 6] are not in the files"),
    ("resumes", Working, "the tracker writes outside of the run's folder: last_step.txt"),
]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(("check", "faulty", "sentence"), FAULTS)
def test_a_faulty_one_is_refused(check: str, faulty: type, sentence: str) -> None:
    reason = refusal("core/jsonl", check, faulty)
    assert sentence in reason, reason
    assert __file__ in reason, "it names the author's file"


def test_each_check_has_a_fault() -> None:
    assert {check for check, *_ in FAULTS} == set(TRACKER.checks)
