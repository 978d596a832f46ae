"""Trackers of other programs: Weights & Biases and MLflow. Each needs its own package (extras of mm-core)."""

from __future__ import annotations

import importlib
import logging
import queue
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from mm_core.contracts import Clip, Ending
from mm_core.data.media.video_files import clip_name
from mm_core.errors import MMError
from mm_core.runtime.background import BackgroundQueue
from mm_core.runtime.launch.signals import STOPPED

_BACKLOG = 1000
_UNANSWERED = 15.0
"""Seconds that the end of a run waits for a server that has answered nothing at all."""

_STATES: Mapping[Ending, str] = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""MLflow's words."""

_EXIT_CODES: Mapping[Ending, int] = {"done": 0, "stopped": STOPPED, "failed": 1}


class WandbTracker:
    """Metrics, config and clips to Weights & Biases. A run that resumes continues the same W&B run.

    Curves are over the metric `step`, not over W&B's own counter, which does not go back: what a run that
    died had logged beyond its checkpoint stays visible beside what the resumed one logs. A thread makes
    every call, the first one too: a server that does not answer holds up neither start nor steps.
    """

    def __init__(
        self,
        run_dir: Path,
        project: str,
        entity: str | None,
        mode: str,
        tags: Sequence[str],
        finish_timeout: float,
    ) -> None:
        self._wandb = _library("wandb", "wandb")
        settings: dict[str, object] = {"console": "off", "login_timeout": 30}
        if "finish_timeout" in getattr(self._wandb.Settings, "model_fields", ()):  # from 0.22 on
            settings["finish_timeout"] = finish_timeout
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        begin = partial(
            self._open,
            project=project,
            entity=entity,
            dir=str(run_dir),
            id=_kept_id(run_dir, "wandb") or _keep_id(run_dir, "wandb", uuid.uuid4().hex[:12]),
            name=Path(run_dir).name,
            tags=list(tags),
            config=_config(run_dir),
            resume="allow",
            mode=mode,
            settings=settings,
        )
        self._run: Any = None
        self._timeout = finish_timeout
        self._courier = Courier()
        self._courier.send(begin)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands the metrics to W&B's own process."""
        row = {**metrics, "step": step}
        self._courier.send(lambda: self._run.log(row))

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Adds the mp4 files as one panel, `samples`."""
        captions = [(str(path), clip.prompt) for path, clip in _files(clips, folder)]
        self._courier.send(partial(self._send_clips, step, captions))

    def close(self, ending: Ending) -> None:
        """Waits until everything is uploaded, or the time for it is up."""
        self._courier.send(lambda: self._run.finish(exit_code=_EXIT_CODES[ending]))
        self._courier.close(self._timeout)

    def _open(self, **options: object) -> None:
        self._run = self._wandb.init(**options)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _send_clips(self, step: int, captions: Sequence[tuple[str, str]]) -> None:
        videos = [self._wandb.Video(path, caption=prompt, format="mp4") for path, prompt in captions]
        self._run.log({"samples": videos, "step": step})


class MlflowTracker:
    """Metrics, config and clips to an MLflow store or server. A run that resumes continues its MLflow run.

    A thread makes every call, in order, the first one too: a server that is slow, or does not answer,
    holds up neither start nor steps.
    """

    def __init__(
        self, run_dir: Path, tracking_uri: str | None, experiment: str, finish_timeout: float
    ) -> None:
        mlflow = _library("mlflow", "mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._timeout = finish_timeout
        self._id = ""
        # It tells of each of the library's retries; what becomes of them is told once, by us.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self._courier = Courier()
        missing: type[Exception] = mlflow.exceptions.MlflowException
        self._courier.send(partial(self._open, Path(run_dir), experiment, missing))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics."""
        now = int(time.time() * 1000)
        batch = [self._entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._courier.send(lambda: self._client.log_batch(self._id, metrics=batch))

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Sends the mp4 files, as artifacts under `samples/step_00000010`."""
        place = f"samples/step_{step:08d}"
        for path, _ in _files(clips, folder):
            self._courier.send(partial(self._send_file, path, place))

    def close(self, ending: Ending) -> None:
        """Waits until everything is sent, or the time for it is up."""
        self._courier.send(lambda: self._client.set_terminated(self._id, _STATES[ending]))
        self._courier.close(self._timeout)

    def _send_file(self, path: Path, place: str) -> None:
        self._client.log_artifact(self._id, str(path), place)

    def _open(self, run_dir: Path, experiment: str, missing: type[Exception]) -> None:
        """Finds the run's MLflow run, or begins one."""
        if (kept := _kept_id(run_dir, "mlflow")) is not None:
            try:
                self._client.update_run(kept, status="RUNNING")
                self._id = kept
                return
            except missing as fault:
                if fault.error_code == "INTERNAL_ERROR":  # type: ignore[attr-defined]
                    raise  # no answer; else it is another store, or the run was deleted there
        found = self._client.get_experiment_by_name(experiment)
        home = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        begun = self._client.create_run(home, run_name=run_dir.name)
        self._id = _keep_id(run_dir, "mlflow", str(begun.info.run_id))
        self._describe(run_dir)

    def _describe(self, run_dir: Path) -> None:
        """The config, as parameters to compare runs by and as a file."""
        parameters = [self._entities.Param(key, text[:500]) for key, text in _leaves(_config(run_dir))]
        for first in range(0, len(parameters), 100):  # the most that a request may hold
            self._client.log_batch(self._id, params=parameters[first : first + 100])
        if (run_dir / "config.yaml").exists():
            self._client.log_artifact(self._id, str(run_dir / "config.yaml"))


class Courier:
    """Makes calls on a thread of its own, in order. The first that fails is the last: its error is raised
    by the next `send`, or by `close`."""

    def __init__(self) -> None:
        self._calls = BackgroundQueue("tracker", "telling the server", _BACKLOG)
        self._answered = False

    def send(self, call: Callable[[], object]) -> None:
        """Queues a call. MMError when the queue is full."""
        self._raise_fault()
        try:
            self._calls.give(partial(self._make, call))
        except queue.Full:
            raise MMError(f"the server is {_BACKLOG} messages behind") from None

    def close(self, timeout: float) -> None:
        """Waits for the calls that are queued. MMError when they take longer than `timeout` seconds, or
        `_UNANSWERED` where not one has come back."""
        timeout = timeout if self._answered else min(timeout, _UNANSWERED)
        unsent = self._calls.finish(timeout)
        self._raise_fault()
        if unsent and not self._answered:
            raise MMError(f"the server has not answered, {timeout:g} seconds after the end of the run")
        if unsent:
            raise MMError(f"{unsent} messages were not sent within {timeout:g} seconds")

    def _make(self, call: Callable[[], object]) -> None:
        if self._calls.fault is None:
            call()
            self._answered = True

    def _raise_fault(self) -> None:
        if self._calls.fault is not None:
            raise self._calls.fault


def forget_runs(run_dir: Path) -> None:
    """Trackers that are opened afterwards begin a new run of theirs: for a run that begins anew."""
    for path in Path(run_dir).glob("*_run_id.txt"):
        path.unlink()


def _library(name: str, extra: str) -> ModuleType:
    """The package. MMError when it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MMError(f"{name} is not installed", hint=f"pip install 'mm-core[{extra}]'") from None


def _kept_id(run_dir: Path, tracker: str) -> str | None:
    path = Path(run_dir) / f"{tracker}_run_id.txt"
    return path.read_text(encoding="utf-8").strip() or None if path.exists() else None


def _keep_id(run_dir: Path, tracker: str, run: str) -> str:
    run_dir.mkdir(parents=True, exist_ok=True)
    (Path(run_dir) / f"{tracker}_run_id.txt").write_text(run + "\n", encoding="utf-8")
    return run


def _config(run_dir: Path) -> dict[str, object]:
    """The run's config as it is on disk: with what came from the environment left as written."""
    path = Path(run_dir) / "config.yaml"
    found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    return found if isinstance(found, dict) else {}


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as text."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, str(value)


def _files(clips: Sequence[Clip], folder: Path) -> list[tuple[Path, Clip]]:
    """Each clip with its file. Hosts may not share a disk: what other hosts have written is left out."""
    paths = [Path(folder) / clip_name(index, clip.prompt) for index, clip in enumerate(clips)]
    return [(path, clip) for path, clip in zip(paths, clips, strict=True) if path.exists()]
