"""The trackers wandb and mlflow with the real packages: W&B offline, MLflow with a local store."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mm_core.builtin.configs.trackers import MlflowConfig, WandbConfig
from mm_core.builtin.configs.training import TensorBoardConfig
from mm_core.contracts import Clip
from mm_core.data.media.video_files import write_clips
from mm_core.errors import MMError
from mm_core.plugin.registry import get_registry
from mm_core.schema.fields import ComponentConfig
from mm_core.telemetry.trackers.local import open_trackers, read_metrics
from mm_core.telemetry.trackers.remote import Courier, MlflowTracker, WandbTracker

YAML = "run: {name: shapes, dir: runs}\ntrain: {steps: 3, micro_batch_size: 2}\nsecret: ${oc.env:TOKEN}\n"


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run before its trackers are opened."""
    folder = tmp_path / "shapes"
    folder.mkdir()
    (folder / "config.yaml").write_text(YAML)
    return folder


@pytest.fixture
def clips(run) -> tuple[list[Clip], Path]:
    made = [Clip(torch.full((3, 4, 16, 16), value), 8.0, f"a clip at {value}") for value in (0.0, 0.5)]
    folder = run / "samples/step_00000002"
    write_clips(made, folder)
    return made, folder


# -- Weights & Biases ------------------------------------------------------------------------------


@pytest.fixture
def wandb_at_home(monkeypatch, tmp_path):
    """Keeps W&B's files in the folder of the test."""
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)


def wandb_records(path: Path):
    """The records of a W&B file: LevelDB's log format after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # too little of the block is left for a header
            position += 32768 - position % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_history(run: Path) -> tuple[list[str], list[dict]]:
    """Ids of the W&B runs that were created, and what they logged, in order."""
    ids, rows = [], []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                ids.append(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
    return ids, rows


def open_wandb(run: Path) -> WandbTracker:
    return WandbTracker(run, **vars(WandbConfig(project="tests", mode="offline", tags=("a", "b"))))


@pytest.mark.slow
def test_wandb_holds_metrics_clips_and_config_and_a_resume_is_the_same_run(run, clips, wandb_at_home):
    tracker = open_wandb(run)
    tracker.log(1, {"loss": 0.5, "validation/loss": 0.25})
    tracker.log(2, {"loss": math.nan})
    tracker.clips(2, *clips)
    tracker.close("done")
    time.sleep(1.1)  # W&B names the folder of an offline run by the second
    again = open_wandb(run)
    again.log(2, {"loss": 0.125})  # behind what was logged: W&B's own counter would refuse it
    again.close("done")

    ends = time.monotonic() + 20
    while len((found := wandb_history(run))[1]) < 4 and time.monotonic() < ends:
        time.sleep(0.1)  # `finish` of an offline run returns while W&B's own process still writes
    ids, rows = found
    assert ids[0] == ids[-1] == (run / "wandb_run_id.txt").read_text().strip()
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert losses[0] == (1, 0.5) and losses[2] == (2, 0.125) and len(losses) == 3
    assert losses[1][0] == 2 and math.isnan(losses[1][1])
    assert rows[0]["validation/loss"] == 0.25
    (shown,) = (row for row in rows if "samples.videos" in row)
    assert (shown["step"], shown["samples.captions"]) == (2, ["a clip at 0.0", "a clip at 0.5"])
    media = next(run.glob("wandb/offline-run-*/files/media")).parent
    kept = [(media / video["path"]).read_bytes() for video in shown["samples.videos"]]
    assert kept == [path.read_bytes() for path in sorted(clips[1].glob("*.mp4"))]
    begun = next(r.run for r in wandb_records(next(run.glob("wandb/offline-run-*/*.wandb"))) if r.run.run_id)
    config = {update.key: json.loads(update.value_json) for update in begun.config.update}
    assert config["secret"] == "${oc.env:TOKEN}" and config["train"] == {"steps": 3, "micro_batch_size": 2}
    assert (begun.project, begun.display_name, list(begun.tags)) == ("tests", "shapes", ["a", "b"])


@pytest.mark.parametrize(("ending", "code"), [("done", 0), ("stopped", 75), ("failed", 1)])
def test_wandb_receives_the_exit_code_of_the_run(run, wandb_at_home, ending, code):
    open_wandb(run).close(ending)
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    ends, codes = time.monotonic() + 20, []
    while not codes and time.monotonic() < ends:
        time.sleep(0.1)
        records = [r for r in wandb_records(path) if r.WhichOneof("record_type") == "exit"]
        codes = [record.exit.exit_code for record in records]
    assert codes == [code]


# -- MLflow ----------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return f"file:{tmp_path / 'mlflow'}"


def open_mlflow(run: Path, store: str) -> MlflowTracker:
    return MlflowTracker(run, **vars(MlflowConfig(tracking_uri=store, experiment="tests")))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_holds_metrics_clips_and_config_and_a_resume_is_the_same_run(run, clips, store):
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=store)
    tracker = open_mlflow(run, store)
    tracker.log(1, {"loss": 0.5, "loss_by_sigma/0.1-0.2": 0.25})
    tracker.clips(2, *clips)
    tracker.close("done")
    found = client.get_experiment_by_name("tests")
    (first,) = client.search_runs([found.experiment_id])
    assert (first.info.run_name, first.info.status) == ("shapes", "FINISHED")

    again = open_mlflow(run, store)
    again.log(2, {"loss": 0.125})
    again.close("done")
    (only,) = client.search_runs([found.experiment_id])
    assert only.info.run_id == (run / "mlflow_run_id.txt").read_text().strip()
    history = client.get_metric_history(only.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.125)]
    assert only.data.metrics["loss_by_sigma/0.1-0.2"] == 0.25
    assert only.data.params["train.steps"] == "3" and only.data.params["secret"] == "${oc.env:TOKEN}"
    stored = [Path(a.path).name for a in client.list_artifacts(only.info.run_id, "samples/step_00000002")]
    assert stored == [path.name for path in sorted(clips[1].glob("*.mp4"))] and len(stored) == 2
    kept = client.download_artifacts(only.info.run_id, "config.yaml", str(run))
    assert Path(kept).read_text() == YAML


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_names_that_it_accepts(run, store):
    import mlflow

    tracker = open_mlflow(run, store)
    tracker.log(1, {"f1@50%": 0.5, "recall/größe (m)": 0.25, "loss_at/0.1": 0.125})
    tracker.close("done")
    client = mlflow.MlflowClient(tracking_uri=store)
    found = client.get_run((run / "mlflow_run_id.txt").read_text().strip()).data.metrics
    assert found == {"f1_50_": 0.5, "recall/größe _m_": 0.25, "loss_at/0.1": 0.125}


@pytest.mark.filterwarnings("ignore")
def test_an_mlflow_experiment_that_another_run_creates_first_is_used(run, store, monkeypatch):
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=store)
    ours = client.create_experiment("tests")
    ask, asked = mlflow.MlflowClient.get_experiment_by_name, []

    def late(self, name):
        asked.append(name)
        return ask(self, name) if len(asked) > 1 else None

    monkeypatch.setattr(mlflow.MlflowClient, "get_experiment_by_name", late)
    open_mlflow(run, store).close("done")
    kept = (run / "mlflow_run_id.txt").read_text().strip()
    assert client.get_run(kept).info.experiment_id == ours


@pytest.mark.filterwarnings("ignore")
def test_another_mlflow_store_gets_a_run_of_its_own(run, store, tmp_path):
    open_mlflow(run, store).close("done")
    first = (run / "mlflow_run_id.txt").read_text()
    open_mlflow(run, f"file:{tmp_path / 'other'}").close("done")
    assert (run / "mlflow_run_id.txt").read_text() != first


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("ending", "status"), [("stopped", "KILLED"), ("failed", "FAILED")])
def test_mlflow_receives_how_a_run_ended_and_a_resume_runs_again(run, store, ending, status):
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=store)
    open_mlflow(run, store).close(ending)
    kept = (run / "mlflow_run_id.txt").read_text().strip()
    assert client.get_run(kept).info.status == status
    again, begun = open_mlflow(run, store), threading.Event()
    again._courier.send(begun.set)
    assert begun.wait(30) and client.get_run(kept).info.status == "RUNNING"
    again.close("done")
    assert client.get_run(kept).info.status == "FINISHED"


# -- whatever they report to ----------------------------------------------------------------------


def components(*trackers: tuple[str, object]) -> list[ComponentConfig]:
    return [ComponentConfig("tracker", name, vars(config)) for name, config in trackers]


def test_a_package_that_is_missing_is_a_readable_error_and_the_run_goes_on(run, monkeypatch):
    absent = {"wandb": WandbConfig(), "mlflow": MlflowConfig(), "tensorboard": TensorBoardConfig()}
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    notes: list[str] = []
    wanted = components(*((f"core/{name}", config) for name, config in absent.items()))
    trackers = open_trackers(run, wanted, 0, notes.append, get_registry())
    trackers.log(1, {"loss": 0.5})
    trackers.close("done")
    assert notes == [
        f"warning: tracker core/{name} could not start and is switched off: {name} is not installed\n"
        f"  hint: pip install 'mm-core[{name}]'"
        for name in absent
    ]
    assert read_metrics(run) == [{"step": 1, "loss": 0.5}]


def test_a_tracker_that_cannot_start_reports_why_and_the_others_work(run, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    notes: list[str] = []
    broken = MlflowConfig(tracking_uri="nowhere://at-all")
    trackers = open_trackers(run, components(("core/mlflow", broken)), 0, notes.append, get_registry())
    trackers.log(1, {"loss": 0.5})
    trackers.close("done")
    assert len(notes) == 1
    assert notes[0].startswith("warning: tracker core/mlflow could not start and is switched off: ")
    assert "nowhere" in notes[0]
    assert read_metrics(run) == [{"step": 1, "loss": 0.5}]


def test_only_a_run_that_begins_anew_forgets_the_runs_of_its_trackers(run):
    kept = run / "mlflow_run_id.txt"
    kept.write_text("abc\n")
    for step in (1, 2, 3):
        open_trackers(run, [], step, print, get_registry()).close("done")
    assert kept.exists()
    open_trackers(run, [], 0, print, get_registry()).close("done")
    assert not kept.exists()


@pytest.fixture(params=["nobody listens", "nobody answers"])
def lost_server(request) -> Iterator[str]:
    """The address of a server that does not exist, or accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "nobody answers":
            server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


LOST = """
import sys, time
import mlflow, wandb  # which takes seconds, whatever the server does
from pathlib import Path
from mm_core.schema.fields import ComponentConfig
from mm_core.plugin.registry import get_registry
from mm_core.telemetry.trackers import local, remote

remote._UNANSWERED = 3.0  # the end waits as long
name, run, address = sys.argv[1:]
common = {"finish_timeout": 600.0}
own = {
    "mlflow": {"tracking_uri": address, "experiment": "tests"},
    "wandb": {"project": "tests", "entity": None, "mode": "online", "tags": ()},
}
began = time.monotonic()
found = local.open_trackers(
    Path(run), [ComponentConfig("tracker", f"core/{name}", own[name] | common)], 0, print, get_registry()
)
for step in (1, 2, 3):
    found.log(step, {"loss": 0.5})
print("began", time.monotonic() - began)
time.sleep(3)  # the library tries again and again meanwhile
found.close("done")
print("ended", time.monotonic() - began, flush=True)
import os
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_server_that_is_lost_holds_neither_start_nor_steps_and_is_one_warning(
    name, run, lost_server, wandb_at_home
):
    # A process of its own: W&B reads its environment once, and would hold this one's end.
    done = subprocess.run(
        [sys.executable, "-c", LOST, name, str(run), lost_server],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"WANDB_BASE_URL": lost_server, "WANDB_API_KEY": "0" * 40},
    )
    assert done.returncode == 0, done.stderr
    began, ended = (float(line.split()[1]) for line in done.stdout.splitlines())
    assert began < 2 and ended < 10
    own = [line for line in done.stderr.splitlines() if not line.startswith("wandb: ")]
    assert own == [
        f"tracker core/{name} could not be closed and may lack the last metrics (see metrics.jsonl): "
        "MMError: the server did not answer within 3 seconds after the end of the run",
        "  hint: check the address of the server and the network",
    ]
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore")
def test_a_server_that_is_lost_for_good_is_switched_off(run, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # minutes, by default
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    (run / "mlflow_run_id.txt").write_text("abc\n")
    wanted = components(("core/mlflow", MlflowConfig(tracking_uri=address)))
    with caplog.at_level(logging.WARNING):
        trackers, ends = open_trackers(run, wanted, 1, print, get_registry()), time.monotonic() + 30
        while not caplog.records and time.monotonic() < ends:
            trackers.log(2, {"loss": 0.5})
            time.sleep(0.05)
        trackers.close("done")
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(
        "tracker core/mlflow failed at step 2 and is switched off until the run is resumed: MlflowException: "
    )
    assert (run / "mlflow_run_id.txt").read_text() == "abc\n", "the next resume may find the server"


def test_a_slow_server_does_not_hold_the_sender_and_calls_keep_their_order():
    gate, calls, courier = threading.Event(), [], Courier()
    courier.send(gate.wait)
    for number in range(5):
        courier.send(lambda number=number: calls.append(number))
    assert calls == []
    gate.set()
    courier.close(10)
    assert calls == [0, 1, 2, 3, 4]


def test_the_first_call_that_fails_is_the_last_and_is_reported():
    courier, calls, failed = Courier(), [], threading.Event()

    def fail() -> None:
        failed.set()
        raise ConnectionError("the server is gone")

    courier.send(fail)
    assert failed.wait(10)
    with pytest.raises(ConnectionError, match="the server is gone"):
        for _ in range(1000):
            courier.send(lambda: calls.append(1))
            threading.Event().wait(0.01)
    with pytest.raises(ConnectionError):
        courier.close(10)
    assert calls == []


def test_a_server_that_hangs_does_not_hold_the_end_of_the_run():
    gate, answered, courier = threading.Event(), threading.Event(), Courier()
    courier.send(lambda: None)
    courier.send(lambda: (answered.set(), gate.wait()))
    assert answered.wait(10)
    courier.send(print)
    with pytest.raises(MMError, match=r"the server did not take 2 messages within 0.05 seconds"):
        courier.close(0.05)
    gate.set()


def test_messages_do_not_pile_up_without_end(monkeypatch):
    monkeypatch.setattr("mm_core.telemetry.trackers.remote._BACKLOG", 3)
    gate, started, courier = threading.Event(), threading.Event(), Courier()
    courier.send(lambda: (started.set(), gate.wait()))
    assert started.wait(10)
    with pytest.raises(MMError, match="the server is 3 messages behind"):
        for _ in range(4):
            courier.send(print)
    gate.set()
