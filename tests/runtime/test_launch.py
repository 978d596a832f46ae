"""Several ranks: a failure is printed once, signals save, and every process is gone afterwards."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from mm_core.cli.main import main
from support import warm

HERE = Path(__file__).parent


@pytest.fixture
def faulty(tiny, tmp_path) -> list[object]:
    """Arguments of a 2-rank run on the faulty components."""
    warm.address()  # its start is not a part of what is measured
    config = yaml.safe_load(tiny.read_text())
    config["task"]["type"], config["data"]["train"]["type"] = "local/faulty_task", "local/faulty_data"
    config["plugins"] = {"path": [str(HERE / "faulty.py")]}
    path = tmp_path / "faulty.yaml"
    path.write_text(yaml.safe_dump(config))
    return ["train", "--config", path, f"run.dir={tmp_path}"]


def test_a_typo_is_found_before_ranks_start(tiny, mm):
    done = mm("train", "--config", tiny, "--nproc", 2, "train.stepz=3")
    assert done.code == 1
    assert "override 'train.stepz=3': train.stepz" in done.err and "steps" in done.err
    assert done.err.count("stepz=3") == 1


def test_a_missing_config_is_a_readable_error(mm, tmp_path):
    done = mm("train", "--config", tmp_path / "none.yaml")
    assert done.code == 1 and "there is no such file" in done.err and "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "sentence", "code"),
    [
        (["--nproc", "two"], "--nproc: 'two' is not a number of ranks; accepted: 1, 2, ... or auto", 2),
        (["--nnodes", "0"], "--nnodes: '0' is not a number of hosts", 1),
        (["--nnodes", "2"], "--rdzv-endpoint: 2 hosts need a rendezvous address", 1),
        (["--rdzv-endpoint", "localhost:99999"], "--rdzv-endpoint: 'localhost:99999' is not an address", 1),
        (["--rdzv-endpoint", "localhost"], "--rdzv-endpoint: 'localhost' is not an address", 1),
        (["--rdzv-endpoint", "a:29500"], "--nnodes: --rdzv-endpoint is of a launch on several hosts", 1),
        (["--node-rank", "1"], "--nnodes: --node-rank is of a launch on several hosts", 1),
    ],
)
def test_launch_options_are_checked(tiny, mm, arguments, sentence, code):
    done = mm("train", "--config", tiny, *arguments)
    assert done.code == code and sentence in done.err and "Traceback" not in done.err


def test_a_rendezvous_host_without_a_known_name_is_waited_for_by_name(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mm_core.runtime.launch.launcher.launch", lambda *given, **named: 0)
    meeting = ["--nnodes", "2", "--rdzv-endpoint", "nowhere.invalid:29500"]
    assert main(["train", "--config", str(tiny), *meeting, f"run.dir={tmp_path}"]) == 0
    assert "the name nowhere.invalid is not known to this host: waiting for it" in capsys.readouterr().err


@pytest.mark.slow
def test_a_launcher_sets_the_log_of_torch_before_anything_imports_it(tiny, start):
    """Otherwise frames of C++ bury its own lines when the rendezvous host is gone."""
    code = "import sys; from mm_core.cli.main import main; from mm_core.runtime.launch import launcher;"
    code += (
        "launcher.quiet_torch = lambda: print('torch' in sys.modules); launcher.launch = lambda *a, **k: 0;"
    )
    options = ["--nproc", 1, "--nnodes", "1:2", "--rdzv-endpoint", "localhost:29500"]
    ended = start("-c", f"{code} main(sys.argv[1:])", "train", "--config", tiny, *options, anew=True).end()
    assert ended.out == "False\n", ended.err


@pytest.mark.slow
def test_bad_input_on_one_rank_is_reported_once_and_all_ranks_are_gone(faulty, mm, tmp_path):
    began = time.monotonic()
    done = mm(*faulty, "--nproc", 2, cwd=tmp_path, FAULT="data")
    assert done.code == 1
    assert time.monotonic() - began < 60, "start-up included; ranks themselves go within 35 s"
    assert done.err.count("mm: error:") == 1 and "Traceback" not in done.err
    assert "rank 1" in done.err and "could not be read" in done.err
    assert not _processes(tmp_path)


@pytest.mark.slow
def test_a_killed_rank_is_explained(faulty, mm, tmp_path):
    done = mm(*faulty, "--nproc", 2, cwd=tmp_path, FAULT="killed")
    assert done.code == 128 + signal.SIGKILL
    assert done.err.count("mm: error:") == 1 and "Traceback" not in done.err
    assert "rank 1 was killed (SIGKILL); the usual reason is that the host ran out of memory" in done.err
    assert not _processes(tmp_path)


@pytest.mark.slow
def test_a_loss_that_is_no_number_changes_nothing(faulty, mm, tmp_path):
    done = mm(*faulty, "--nproc", 2, FAULT="nan")
    assert done.code == 1 and "Traceback" not in done.err
    assert done.err.count("mm: error:") == 1
    assert "rank 1: step 1, samples ['" in done.err
    assert "the loss is not finite; " in done.err and "; no parameter was changed" in done.err
    assert not list((tmp_path / "tiny/checkpoints").glob("step_*"))


@pytest.fixture
def endless(faulty, tmp_path, start, wait_until):
    """A run of many slow steps, under way."""

    def begin(nproc):
        arguments = [*faulty, "--nproc", nproc, "train.steps=500"]
        running = start("-m", "mm_core.cli.main", *arguments, FAULT="slow", OMP_NUM_THREADS="1")
        metrics = tmp_path / "tiny/metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, 120)
        return running

    return begin


def _saved_at_its_last_step(folder: Path) -> bool:
    steps = len((folder / "metrics.jsonl").read_text().splitlines())
    return (folder / f"checkpoints/step_{steps:08d}/checksums.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "number"), [(2, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_signal_saves_at_the_end_of_the_step(endless, tmp_path, nproc, number):
    running = endless(nproc)
    running.send(number)
    ended = running.end()
    assert ended.code == 75, ended.err
    assert f"stopped by {number.name} after step" in ended.out and "Traceback" not in ended.err
    assert f"mm: {number.name} received: saving after this step, then stopping" in ended.err
    assert _saved_at_its_last_step(tmp_path / "tiny")


@pytest.mark.slow
def test_one_rank_that_is_asked_stops_all(endless, tmp_path):
    running = endless(2)
    log = (tmp_path / "tiny/logs/rank_1.log").read_text()
    (second,) = re.findall(r"--- rank 1 of 2, pid (\d+)", log)
    assert int(second) in _processes(tmp_path)
    os.kill(int(second), signal.SIGUSR1)
    ended = running.end()
    assert ended.code == 75, ended.err
    assert "stopped by a signal to another rank after step" in ended.out
    assert _saved_at_its_last_step(tmp_path / "tiny")


@pytest.mark.slow
def test_torchrun_is_as_good_as_our_launcher(tiny, tmp_path, start):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "mm_core.cli.main"]
    command += ["train", "--config", tiny, f"run.dir={tmp_path}", "train.steps=2"]
    ended = start(*command, anew=True, OMP_NUM_THREADS="1").end()
    assert ended.code == 0, ended.err
    assert (tmp_path / "tiny/checkpoints/step_00000002/checksums.json").exists()


@pytest.mark.slow
def test_two_hosts_meet(tiny, tmp_path, start, free_port):
    command = ["-m", "mm_core.cli.main", "train", "--config", tiny, f"run.dir={tmp_path}", "train.steps=2"]
    command += ["--nproc", 1, "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port}"]
    hosts = [start(*command, OMP_NUM_THREADS="1") for _ in range(2)]
    ends = [host.end() for host in hosts]
    assert [ended.code for ended in ends] == [0, 0], "\n".join(ended.err for ended in ends)
    assert (tmp_path / "tiny/checkpoints/step_00000002/checksums.json").exists()


@pytest.mark.parametrize("ranks", ["2", "auto"])
def test_options_that_a_launcher_has_settled_are_refused(tiny, mm, ranks):
    done = mm("train", "--config", tiny, "--nproc", ranks, RANK="3", WORLD_SIZE="8")
    assert done.code == 1
    assert "--nproc cannot be used here: this process is already rank 3 of 8" in done.err


@pytest.mark.slow
def test_half_an_environment_is_named(tiny, mm):
    done = mm("train", "--config", tiny, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    assert done.code == 1 and "Traceback" not in done.err
    assert "rank 0: environment: RANK is set but MASTER_PORT not" in done.err


def _processes(folder: Path) -> list[int]:
    """Processes whose working folder is `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or it is another user's
            if (entry / "cwd").readlink() == folder and (entry / "comm").read_text().strip() != warm.SPARE:
                found.append(int(entry.name))
    return found
