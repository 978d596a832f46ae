"""Trackers for Weights & Biases and MLflow; each needs its own package (an extra of mm-core)."""

from __future__ import annotations

import importlib
import logging
import queue
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from mm_core.contracts import Clip, Ending
from mm_core.data.media.video_files import clip_name
from mm_core.errors import MMError, plural
from mm_core.runtime.background import BackgroundQueue
from mm_core.runtime.launch.signals import STOPPED
from mm_core.schema.nodes import leaves
from mm_core.telemetry.extras import package

_BACKLOG = 1000
"""Most messages that may wait for a server."""

_UNANSWERED = 15.0
"""Seconds that the end of a run waits for a server that has never answered."""

_STATES: Mapping[Ending, str] = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""States of an MLflow run."""

_REFUSED = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow accepts in no name of a metric."""

_EXIT_CODES: Mapping[Ending, int] = {"done": 0, "stopped": STOPPED, "failed": 1}


class WandbTracker:
    """Tracker that sends metrics, config and sampled clips to Weights & Biases.

    A resumed run continues its W&B run. Curves are drawn over the metric `step` instead of W&B's own counter,
    which cannot go back: what an interrupted run had logged beyond its checkpoint stays visible. A thread
    makes all calls, so a slow server delays neither start nor steps.

    Args:
        run_dir: the run's folder.
        project: W&B project name.
        entity: W&B user or team; None: the logged-in user.
        mode: "online", "offline" or "disabled".
        tags: tags of the run.
        finish_timeout: seconds that the end of a run waits for uploads.
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
        self._wandb = package("wandb", "wandb")
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
        """Queues the metrics of a step for W&B."""
        row = {**metrics, "step": step}
        self._courier.send(lambda: self._run.log(row))

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Queues the mp4 files of sampled clips for W&B, as one panel named `samples`."""
        captions = [(str(path), clip.prompt) for path, clip in _files(clips, folder)]
        self._courier.send(partial(self._send_clips, step, captions))

    def close(self, ending: Ending) -> None:
        """Ends the W&B run and waits for its uploads, up to `finish_timeout`."""
        self._courier.send(lambda: self._run.finish(exit_code=_EXIT_CODES[ending]))
        self._courier.close(self._timeout)

    def _open(self, **options: object) -> None:
        self._run = self._wandb.init(**options)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _send_clips(self, step: int, captions: Sequence[tuple[str, str]]) -> None:
        made = [
            self._wandb.Image(path, caption=prompt)
            if path.endswith(".png")
            else self._wandb.Video(path, caption=prompt, format="mp4")
            for path, prompt in captions
        ]
        self._run.log({"samples": made, "step": step})


class MlflowTracker:
    """Tracker that sends metrics, config and sampled clips to an MLflow store or server.

    A resumed run continues its MLflow run. A thread makes all calls in order, so a slow server delays
    neither start nor steps.

    Args:
        run_dir: the run's folder.
        tracking_uri: server or store; None: MLFLOW_TRACKING_URI, else MLflow's default.
        experiment: MLflow experiment name; created if it does not exist.
        finish_timeout: seconds that the end of a run waits for uploads.
    """

    def __init__(
        self, run_dir: Path, tracking_uri: str | None, experiment: str, finish_timeout: float
    ) -> None:
        mlflow = package("mlflow", "mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._timeout = finish_timeout
        self._id = ""
        # urllib3 logs every retry; one warning about the outcome is enough.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self._courier = Courier()
        missing: type[Exception] = mlflow.exceptions.MlflowException
        self._courier.send(partial(self._open, Path(run_dir), experiment, missing))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues the metrics of a step for MLflow; `_` replaces characters that it accepts in no name."""
        now = int(time.time() * 1000)
        named = {_REFUSED.sub("_", name): value for name, value in metrics.items()}
        batch = [self._entities.Metric(name, value, now, step) for name, value in named.items()]
        self._courier.send(lambda: self._client.log_batch(self._id, metrics=batch))

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Queues the mp4 files of sampled clips for MLflow, as artifacts under `samples/step_00000010`."""
        place = f"samples/step_{step:08d}"
        for path, _ in _files(clips, folder):
            self._courier.send(partial(self._send_file, path, place))

    def close(self, ending: Ending) -> None:
        """Ends the MLflow run and waits for its uploads, up to `finish_timeout`."""
        self._courier.send(lambda: self._client.set_terminated(self._id, _STATES[ending]))
        self._courier.close(self._timeout)

    def _send_file(self, path: Path, place: str) -> None:
        self._client.log_artifact(self._id, str(path), place)

    def _open(self, run_dir: Path, experiment: str, missing: type[Exception]) -> None:
        """Continues the MLflow run of an earlier process, or creates one."""
        if (kept := _kept_id(run_dir, "mlflow")) is not None:
            try:
                self._client.update_run(kept, status="RUNNING")
                self._id = kept
                return
            except missing as fault:
                if fault.error_code == "INTERNAL_ERROR":  # type: ignore[attr-defined]
                    raise  # no answer; other errors: the store is another one, or the run was deleted there
        begun = self._client.create_run(self._home(experiment, missing), run_name=run_dir.name)
        self._id = _keep_id(run_dir, "mlflow", str(begun.info.run_id))
        self._describe(run_dir)

    def _home(self, experiment: str, missing: type[Exception]) -> str:
        """The id of the experiment, which another run that starts at the same time may create first."""
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(experiment))
            except missing:
                found = self._client.get_experiment_by_name(experiment)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _describe(self, run_dir: Path) -> None:
        """Sends the config, as parameters (to compare runs) and as a file."""
        parameters = [
            self._entities.Param(key, str(value)[:500])
            for key, value in leaves(_config(run_dir))
            if value != {}
        ]
        for first in range(0, len(parameters), 100):  # limit of one request
            self._client.log_batch(self._id, params=parameters[first : first + 100])
        if (run_dir / "config.yaml").exists():
            self._client.log_artifact(self._id, str(run_dir / "config.yaml"))


class Courier:
    """Sends a tracker's messages to its server on a background thread, in order.

    After the first error no further message is sent; the next `send` or `close` raises this error.
    """

    def __init__(self) -> None:
        self._calls = BackgroundQueue("tracker", "sending to the server of a tracker", _BACKLOG)
        self._answered = False

    def send(self, call: Callable[[], object]) -> None:
        """Queues a message for a tracker's server.

        Args:
            call: sends the message; runs on the background thread.

        Raises:
            MMError: the queue is full.
            Exception: the error of an earlier message.
        """
        self._raise_fault()
        try:
            self._calls.give(partial(self._make, call))
        except queue.Full:
            raise MMError(
                f"the server is {_BACKLOG} messages behind", hint="raise log.every to send fewer messages"
            ) from None

    def close(self, timeout: float) -> None:
        """Waits until a tracker's queued messages are sent.

        Args:
            timeout: seconds to wait at most; 15 if the server has never answered.

        Raises:
            MMError: messages are still unsent after that time.
            Exception: the error of an earlier message.
        """
        timeout = timeout if self._answered else min(timeout, _UNANSWERED)
        unsent = self._calls.finish(timeout)
        self._raise_fault()
        if unsent and not self._answered:
            raise MMError(
                f"the server did not answer within {timeout:g} seconds after the end of the run",
                hint="check the address of the server and the network",
            )
        if unsent:
            raise MMError(
                f"the server did not take {plural(unsent, 'message')} within {timeout:g} seconds",
                hint="raise finish_timeout of this tracker, or check the network",
            )

    def _make(self, call: Callable[[], object]) -> None:
        if self._calls.fault is None:
            call()
            self._answered = True

    def _raise_fault(self) -> None:
        if self._calls.fault is not None:
            raise self._calls.fault


def forget_runs(run_dir: Path) -> None:
    """Deletes the ids of W&B and MLflow runs, so that trackers opened later begin new runs."""
    for path in Path(run_dir).glob("*_run_id.txt"):
        path.unlink()


def _kept_id(run_dir: Path, tracker: str) -> str | None:
    path = Path(run_dir) / f"{tracker}_run_id.txt"
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None


def _keep_id(run_dir: Path, tracker: str, run: str) -> str:
    run_dir.mkdir(parents=True, exist_ok=True)
    (Path(run_dir) / f"{tracker}_run_id.txt").write_text(run + "\n", encoding="utf-8")
    return run


def _config(run_dir: Path) -> dict[str, object]:
    """The run's config as on disk: references to environment variables are not resolved."""
    path = Path(run_dir) / "config.yaml"
    found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found if isinstance(found, dict) else {}


def _files(clips: Sequence[Clip], folder: Path) -> list[tuple[Path, Clip]]:
    """Each clip with its file; files written by hosts that do not share this disk are omitted."""
    paths = [Path(folder) / clip_name(index, clip) for index, clip in enumerate(clips)]
    return [(path, clip) for path, clip in zip(paths, clips, strict=True) if path.exists()]
