"""One rank goes wrong: one error is printed, its own or the launcher's, and no process stays behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mm_core.errors import DataError, MMError
from mm_core.runtime.launch.launch_folder import FAILED, LaunchFolder
from mm_core.runtime.launch.launcher import not_started
from mm_core.runtime.launch.meeting import Nodes
from mm_core.runtime.launch.rank_process import GRACE, lost_peer, out_of_memory

SCRIPT = Path(__file__).with_name("ranks_that.py")


def said(ended) -> list[str]:
    return [line for line in ended.err.splitlines() if line.startswith("mm: error:")]


@pytest.mark.slow
def test_the_error_of_one_rank_is_the_only_one_and_all_are_gone_soon(launch):
    ended = launch("error")  # rank 0 waits 100 s, and torch's agent would kill it after 30 s
    assert ended.err == "mm: error: rank 1: clip 3: nothing can be read here\n  hint: look at it\n"
    assert ended.code == 1 and len(ended.pids) == 2 and ended.seconds < 30


@pytest.mark.slow
def test_what_all_ranks_find_is_printed_by_one(launch):
    ended = launch("same")
    (sentence,) = said(ended)
    assert sentence.endswith(": data.json: a fault of the input that every rank finds")
    assert ended.err.count("\n") == 1


@pytest.mark.slow
def test_a_rank_that_was_notified_of_the_failure_first_does_not_cut_the_other_short(launch):
    ended = launch("late")
    assert said(ended) == ["mm: error: rank 1: clip 3: nothing can be read here"]


@pytest.mark.slow
def test_a_bug_shows_where_it_is(launch):
    ended = launch("bug")
    assert ended.err.count("Traceback") == 1 and "in do\n" in ended.err
    assert said(ended) == ["mm: error: rank 1: KeyError: 'a bug in the model'"]


@pytest.mark.slow
def test_debugging_shows_the_traceback_of_an_error(launch):
    ended = launch("same", MM_DEBUG="1")
    assert ended.err.count("Traceback") == 2 and len(said(ended)) == 1


@pytest.mark.slow
def test_an_exit_code_reaches_the_caller(launch):
    ended = launch("exit")
    assert ended.code == 3 and ended.seconds < 30
    assert said(ended) == ["mm: error: rank 1 exited with code 3 without an error message"]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["killed", "gloo"])
def test_a_killed_rank_is_explained_by_the_launcher(launch, scenario):
    ended = launch(scenario)
    assert ended.code == 128 + 9
    (sentence,) = said(ended)
    assert sentence.startswith("mm: error: rank 1 was killed (SIGKILL); the usual reason is that the host")
    assert "Traceback" not in ended.err and ended.seconds < 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "code", "sentence", "logged"),
    [
        ("logged_error", 1, "rank 1: clip 3: nothing can be read here", "in do"),
        (
            "logged_crash",
            128 + 11,
            "rank 1 was ended by the signal SIGSEGV",
            "Fatal Python error: Segmentation fault",
        ),
        (
            "logged_kill",
            128 + 9,
            "rank 1 was killed (SIGKILL); the usual reason is that the host ran out",
            "",
        ),
    ],
)
def test_the_message_about_a_rank_names_its_log(scenario, code, sentence, logged, launch, tmp_path):
    ended = launch(scenario)
    assert ended.code == code
    assert [line.startswith(f"mm: error: {sentence}") for line in said(ended)] == [True]
    assert ended.err.endswith("\n  log: run/logs/rank_1.log\n")
    text = (tmp_path / "run/logs/rank_1.log").read_text()
    assert "--- rank 1 of 2, pid " in text and logged in text


@pytest.mark.slow
def test_a_host_whose_peer_failed_prints_where_to_look(start, free_port):
    hosts = [start(SCRIPT, "launch", "lost", f"127.0.0.1:{free_port}") for _ in range(2)]
    ends = [host.end() for host in hosts]
    assert [ended.code for ended in ends] == [1, 1]
    first, second = sorted((said(ended)[0] for ended in ends), key=len)
    assert first == "mm: error: rank 0: clip 3: nothing can be read here"
    assert re.search(r"rank 1: host \S+ \(\d\) failed: rank 0: clip 3: nothing can be read here", second)


@pytest.mark.slow
def test_under_torchrun_too_one_rank_prints_and_the_folder_goes(start, tmp_path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, SCRIPT, "error"]
    ended = start(*command, anew=True, TMPDIR=str(tmp_path)).end()
    assert said(ended) == ["mm: error: rank 1: clip 3: nothing can be read here"]
    assert ended.code == 1 and ended.seconds < 30
    ended = start(*command[:-1], "fine", anew=True, TMPDIR=str(tmp_path)).end()
    assert ended.code == 0 and len(ended.pids) == 2
    left = [path for path in tmp_path.glob("mm_core-*") if list(path.glob("*.pid"))]
    assert len(left) <= 1, "a rank that was killed leaves its note, good ends leave none"


def test_a_meeting_that_fails_is_a_readable_error_with_what_to_check():
    nodes = Nodes(8, 2, 2, endpoint="head:29500")
    error = not_started(RuntimeError("The connection to the C10d\n store has failed."), nodes)
    assert error.what == "the ranks could not be started: The connection to the C10d store has failed."
    assert "check that head:29500 is reachable from every host" in str(error)


def test_peers_wait_less_than_torchs_agent_before_they_go():
    assert GRACE <= 10


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:13373",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error [127.0.0.1]: Connection reset"
        " by peer",
        "NCCL communicator was aborted on rank 3.",
    ],
)
def test_a_broken_connection_is_no_bug(text):
    error = lost_peer(RuntimeError(text))
    assert error is not None and error.what.startswith("lost the connection to another rank")


def test_a_broken_connection_is_found_under_what_it_caused():
    wrapped = MMError("saving failed")
    wrapped.__cause__ = RuntimeError("Connection closed by peer")
    assert lost_peer(wrapped) is not None


def test_other_errors_are_not_taken_for_a_broken_connection():
    assert lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert lost_peer(DataError("Connection closed by peer")) is None


def test_memory_that_ran_out_gets_advice():
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    error = out_of_memory(caught.value)
    assert error is not None and "train.micro_batch_size" in str(error)
    assert out_of_memory(RuntimeError("a bug")) is None


def test_one_claim_is_granted(tmp_path):
    folder = LaunchFolder(tmp_path)
    assert [folder.mark(FAILED), folder.mark(FAILED)] == [True, False]
    assert LaunchFolder(None).mark(FAILED) and LaunchFolder(None).mark(FAILED), "alone, always"


def test_a_rank_that_vanished_is_noticed_and_one_that_departed_is_not(tmp_path):
    import subprocess

    folder = LaunchFolder(tmp_path)
    folder.enter(0)
    assert not folder.failing()
    child = subprocess.Popen(["true"])
    child.wait()
    (tmp_path / "rank_1.pid").write_text(str(child.pid))
    assert folder.failing()
    folder.depart(1)
    assert not folder.failing()


def test_a_folder_that_others_can_write_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MM_LAUNCH_DIR", raising=False)
    own = LaunchFolder.current().path
    assert own is not None and own.parent == tmp_path
    own.chmod(0o777)
    assert LaunchFolder.current().path is None
