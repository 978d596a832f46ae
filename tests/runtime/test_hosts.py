"""Hosts by ssh: what a hostfile says, what is run on each host, and what ends it. `ssh` is a stand-in that
runs its last argument here, in a shell as sshd does; tests/runs/test_hosts.py connects to real daemons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mm_core.cli.installation.checks import Report
from mm_core.cli.installation.compared import compare
from mm_core.cli.main import main
from mm_core.errors import MMError
from mm_core.processes import alive
from mm_core.runtime.launch import hosts, remote
from mm_core.runtime.launch.hosts import BY_HOSTFILE, Host, passed, read_hosts, run_on_hosts, ssh_words, worst

SAVES = """
import os, signal, sys, time
def save(number, frame):
    print("saved after", signal.Signals(number).name, flush=True)
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, save)
print("pid", os.getpid(), *sys.argv[1:], flush=True)
time.sleep(60)
"""
STUBBORN = "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
STUBBORN += "own = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)';"
STUBBORN += "child = subprocess.Popen([sys.executable, '-c', own], start_new_session=True);"
STUBBORN += "print('pids', os.getpid(), child.pid, flush=True); time.sleep(60)"


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_a_hostfile_is_deepspeeds_with_users_and_ports(tmp_path):
    text = "# a comment\nworker-1 slots=8\n\nme@10.0.0.2:2222   slots=4 max_slots=8 # the old one\n"
    assert read_hosts(hostfile(tmp_path, text)) == [
        Host("worker-1", 8), Host("10.0.0.2", 4, "me", 2222)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        (
            "a slots=2\nb slots=2\na slots=1\n",
            ", line 3",
            "a is listed twice\n  hint: one line for each host: a",
        ),
        ("a\n", ", line 1", "a has no slots\n  accepted: a slots=8"),
        ("a slots=0\n", ", line 1", "a has 'slots=0'"),
        ("a slots=1 slots=2\n", ", line 1", "a has two numbers of slots"),
        ("a slots=2 cores=3\n", ", line 1", "the word 'cores=3' is unknown\n  accepted: slots=N"),
        ("a:ssh slots=2\n", ", line 1", "'a:ssh' is not a host\n  accepted: HOST, USER@HOST or HOST:PORT"),
        ("a:70000 slots=2\n", ", line 1", "'a:70000' is not a host"),
        ("-oProxyCommand=x slots=2\n", ", line 1", "'-oProxyCommand=x' is not a host"),
        ("# none\n", "", "the hostfile names no host"),
        ("localhost slots=1\nb slots=1\n", "", "the other hosts cannot meet at localhost"),
    ],
)
def test_a_line_that_is_not_understood_is_a_sentence(tmp_path, text, line, sentence):
    path = hostfile(tmp_path, text)
    with pytest.raises(MMError) as caught:
        read_hosts(path)
    assert caught.value.render().startswith(f"{path}{line}: {sentence}")


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_bytes(b"\xff slots=1")])
def test_a_hostfile_that_cannot_be_read_is_a_sentence(tmp_path, make):
    make(tmp_path / "hosts")
    with pytest.raises(MMError, match="hosts: the hostfile cannot be read: "):
        read_hosts(tmp_path / "hosts")


def test_hosts_receive_an_allow_list_without_secrets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {
        "PATH": "/bin",
        "PYTHONPATH": "lib:/x",
        "HF_HOME": "/hub",
        "NCCL_DEBUG": "INFO",
        "MM_DEVICE": "cpu",
    }
    kept = {"HF_TOKEN": "t", "MM_API_KEY": "k", "MM_LAUNCH_DIR": "/tmp/x", "SHELL": "/bin/sh", "RANK": "0"}
    assert passed(given | kept) == given | {"PYTHONPATH": f"{tmp_path}/lib:/x"}


def test_a_command_line_of_ssh_shows_nothing_of_the_command(monkeypatch):
    words = ssh_words(Host("b", 2, "me", 2222), {"PYTHONPATH": "/a b", "MM_DEVICE": "npu"})
    assert words[:2] == ["ssh", "-T"] and "BatchMode=yes" in words and "ServerAliveInterval=10" in words
    assert words[-7:-1] == ["-l", "me", "-p", "2222", "--", "b"]
    assert words[-1] == f"env 'PYTHONPATH=/a b' {sys.executable} -P -m mm_core.runtime.launch.remote"


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((0, 0), 0), ((75, 75), 75), ((75, 69), 69), ((69, 1), 1), ((137, 69), 137), ((1, 137), 1),
        ((130, 75), 130), ((69, 0), 0), ((69, 69), 69),
    ],
)  # fmt: skip
def test_the_exit_code_is_the_worst_unless_a_host_has_trained_to_the_end(codes, code):
    assert worst(codes) == worst(codes[::-1]) == code


class Far:
    """A far end with its standard input in the test's hand."""

    def __init__(self, process: subprocess.Popen[str], order: dict[str, object]) -> None:
        self.process = process
        self.say(json.dumps(order))

    def say(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")

    def words(self) -> list[str]:
        while (line := self.process.stdout.readline()) == remote.BEGAN:
            pass
        return line.split()


@pytest.fixture
def far_end() -> Iterator[Callable[..., Far]]:
    """Starts a far end with a Python program, and with other values of its limits."""
    with ExitStack() as processes:

        def begin(program: str, folder: str = "/", **limits: float) -> Far:
            code = f"from mm_core.runtime.launch import remote; vars(remote).update({limits});"
            words, pipe = (
                [sys.executable, "-P", "-c", f"{code} raise SystemExit(remote.main())"],
                subprocess.PIPE,
            )
            process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1)
            command = [sys.executable, "-c", program]
            far = Far(
                processes.enter_context(process), {"command": command, "folder": folder, "environment": {}}
            )
            processes.callback(process.kill)
            return far

        yield begin


def gone(pid: int, seconds: float = 15) -> bool:
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.parametrize("how", ["signal SIGUSR1", "signal SIGTERM", "end"])
def test_the_far_end_passes_signals_on_and_saves_at_the_end_of_its_input(far_end, how):
    far = far_end(SAVES)
    (pid,) = far.words()[1:]
    far.process.stdin.close() if how == "end" else far.say(how)
    assert far.process.wait(15) == 75
    name = "SIGTERM" if how == "end" else how.split()[1]
    assert far.process.stdout.read() == f"saved after {name}\n" and not alive(int(pid))


def test_what_does_not_end_is_killed_with_all_that_it_has_started(far_end):
    far = far_end(STUBBORN, GRACE=0.5)
    pids = [int(pid) for pid in far.words()[1:]]
    far.process.stdin.close()
    assert far.process.wait(20) == 128 + signal.SIGKILL
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_a_silent_connection_counts_as_gone(far_end):
    assert far_end("import time; time.sleep(60)", SILENCE=0.5).process.wait(20) == 128 + signal.SIGTERM


def test_a_folder_that_is_not_there_is_a_sentence(far_end):
    process = far_end("pass", folder="/no/such").process
    assert process.wait(15) == 1
    said = f"{remote.BEGAN}mm: error: /no/such: No such file or directory\n  hint: the folder and"
    assert process.stderr.read().startswith(said)


@pytest.fixture
def ssh(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Puts a shell script in ssh's place; its last argument is $far."""

    def stand_in(script: str) -> None:
        program = tmp_path / "bin/ssh"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\nfor far; do :; done\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    stand_in('echo a shell that greets\nexec sh -c "$far"')
    return stand_in


HOSTS = [Host("a", 2), Host("b", 1, port=22)]


def test_each_host_runs_the_command_as_its_node(ssh, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MM_DEVICE", "it's $HOME")
    code = "import os, sys; print(os.getcwd(), os.environ['MM_DEVICE'], *sys.argv[1:]); sys.stderr.write('e')"
    assert run_on_hosts(HOSTS, [sys.executable, "-c", code, "run.name=a b"], "id", 2) == 0
    out, err = capsys.readouterr()
    start = f"{tmp_path} it's $HOME run.name=a b --rdzv-id id"
    assert sorted(out.splitlines()) == [
        f"[a] {start} --nproc 2 --node-rank 0", f"[b:22] {start} --nproc 1 --node-rank 1"
    ]  # fmt: skip
    assert sorted(err.splitlines()) == ["[a] e", "[b:22] e"]


def test_a_signal_reaches_every_host(ssh, tmp_path):
    code = "import sys; from mm_core.runtime.launch.hosts import *;"
    code += (
        f"sys.exit(run_on_hosts([Host('a', 1), Host('b', 1)], [sys.executable, '-c', {SAVES!r}], 'id', 2))"
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        here = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started = [here.stdout.readline() for _ in "ab"]
        here.send_signal(number)
        out, _ = here.communicate(timeout=20)
        assert here.returncode == 75 and sorted(out.splitlines()) == [
            f"[a] saved after {number.name}", f"[b] saved after {number.name}"
        ], started  # fmt: skip


def test_a_signal_before_a_host_is_among_the_sessions_reaches_it(ssh, tmp_path, monkeypatch, capsys):
    session = hosts.Session
    monkeypatch.setattr(hosts, "PATIENCE", 1.0)

    def start_and_signal(host: Host, *rest: Any) -> hosts.Session:
        started = session(host, *rest)
        while host.name == "b" and len(list(tmp_path.glob("[01]"))) < 2:
            time.sleep(0.05)
        if host.name == "b":
            os.kill(os.getpid(), signal.SIGUSR1)
        return started

    monkeypatch.setattr(hosts, "Session", start_and_signal)
    code = f"{SAVES.rpartition('time')[0]}open({str(tmp_path)!r} + '/' + sys.argv[-1], 'w'); time.sleep(60)"
    assert run_on_hosts([Host("a", 1), Host("b", 1)], [sys.executable, "-c", code], "id", 2) == 75
    assert "[b] saved after SIGUSR1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (
            "echo 'Permission denied (publickey).' >&2; exit 255",
            "ssh does not reach a: Permission denied (publick",
        ),
        (
            "echo no file >&2; exit 127",
            f"a cannot start the command: no file\n  hint: {sys.executable}, with mm_core",
        ),
    ],
)
def test_a_host_that_cannot_start_is_one_sentence(ssh, script, sentence):
    ssh(script)
    with pytest.raises(MMError) as caught:
        run_on_hosts(HOSTS, [sys.executable, "-c", "pass"], "id", 2)
    assert caught.value.render().startswith(sentence)


def test_a_lost_connection_is_code_69_and_ends_the_others(ssh, capsys, monkeypatch):
    monkeypatch.setattr(hosts, "PATIENCE", 0.3)
    ssh('case "$*" in *" b "*) (sleep 2; kill -9 $$) & ;; esac\nsh -c "$far"; exit')
    assert run_on_hosts(HOSTS, [sys.executable, "-c", SAVES], "id", 2) == 69
    out, err = capsys.readouterr()
    assert "mm: lost the connection to b:22\n" in err and "[a] saved after SIGTERM" in out


def test_a_host_that_is_ended_for_anothers_sake_does_not_set_the_exit_code(ssh, capfd, monkeypatch):
    monkeypatch.setattr(hosts, "PATIENCE", 0.3)
    code = "import sys, time; sys.exit(69) if sys.argv[-1] == '1' else time.sleep(60)"
    assert run_on_hosts(HOSTS, [sys.executable, "-c", code], "id", 2) == 69


@pytest.mark.slow
def test_a_first_host_that_only_ssh_knows_is_named_at_once(ssh, tiny, tmp_path, capsys):
    path = hostfile(tmp_path, "nodea.invalid slots=1\nnodeb.invalid slots=1\n")
    assert main(["train", "--config", str(tiny), "--hostfile", str(path), f"run.dir={tmp_path}"]) == 1
    out, err = capsys.readouterr()
    said = "mm: error: rendezvous: the name nodea.invalid is not known to this host\n"
    assert not out and sorted(err.splitlines(keepends=True))[:2] == [
        "[nodea.invalid]   hint: names of ssh's config are known to ssh alone: write an address in the first"
        " line of the hostfile, or add --rdzv-endpoint ADDRESS:PORT\n",
        f"[nodea.invalid] {said}",
    ]
    assert err.count(said) == 2 and err.count("\n") == 4


@pytest.mark.slow
def test_the_doctor_finds_a_first_host_that_only_ssh_knows(ssh, tmp_path, capsys):
    path = hostfile(tmp_path, "nodea.invalid slots=1\n")
    assert main(["doctor", "--hosts", str(path), "--dir", str(tmp_path)]) == 1
    said = "error: nodea.invalid: the name nodea.invalid is not known to this host\n  fix: names of ssh's"
    assert said in capsys.readouterr().out


def test_all_hosts_start_again_after_the_loss_of_one(ssh, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "PATIENCE", 0.3)
    monkeypatch.setattr(hosts, "PAUSE", 0.1)
    once = f"[ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; (sleep 2; kill -9 $$) & }}"
    ssh(f'case "$*" in *" b "*) {once} ;; esac\nsh -c "$far"; exit')
    code = (
        f"import os, sys\nif 'id.1' not in sys.argv:\n    exec({SAVES!r})\nprint(os.environ[{BY_HOSTFILE!r}])"
    )
    assert run_on_hosts(HOSTS, [sys.executable, "-c", code], "id", 2, restarts=1) == 0
    out, err = capsys.readouterr()
    assert "mm: all hosts start again, 1 of 1, in 0 s\n" in err
    for restart in (json.loads(line[4:]) for line in out.splitlines() if line.startswith("[a] {")):
        assert restart["what"] == "b:22 ended with 69"
        assert (restart["number"], restart["code"], restart["hosts"]) == (1, 69, ["a", "b:22"])
        break
    else:
        pytest.fail(f"the host is told nothing of the restart: {out}")


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({"0": 69, "1": 69}, 69),  # both have no restarts left, or none that helps
        ({"0": 0, "1": 137}, 137),  # one has trained to the end
    ],
)
def test_hosts_do_not_start_again_against_their_own_decision(ssh, capsys, monkeypatch, codes, code):
    monkeypatch.setattr(hosts, "PATIENCE", 0.3)
    program = f"import sys; sys.exit({codes!r}[sys.argv[-1]])"
    assert run_on_hosts(HOSTS, [sys.executable, "-c", program], "id", 2, restarts=3) == code
    assert "start again" not in capsys.readouterr().err


def test_a_lost_host_that_is_not_back_yet_is_tried_again(ssh, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "PATIENCE", 0.3)
    monkeypatch.setattr(hosts, "PAUSE", 0.1)
    turn = f"echo x >> {tmp_path}/turns; case $(grep -c x {tmp_path}/turns) in"
    lost = f'{turn} 1) (sleep 2; kill -9 $$) & ;; 2) echo "no route to host" >&2; exit 255 ;; esac'
    ssh(f'case "$*" in *" b "*) {lost} ;; esac\nsh -c "$far"; exit')
    code = f"import sys\nif 'id.2' not in sys.argv:\n    exec({SAVES!r})"
    assert run_on_hosts(HOSTS, [sys.executable, "-c", code], "id", 2, restarts=2) == 0
    err = capsys.readouterr().err
    assert "mm: ssh does not reach b:22: no route to host\nmm: all hosts start again, 2 of 2" in err


def test_without_ssh_the_package_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MMError, match="the program ssh is not found\n  hint: install openssh-client"):
        run_on_hosts(HOSTS, ["true"], "id", 2)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--nproc", "2"], "--hostfile starts a run with the ranks that it lists: it goes without --nproc"),
        (["--dry-run"], "it goes without --nproc, --node-rank, --dry-run and --verify-resume"),
        (["--nnodes", "1:3", "--rdzv-endpoint", "a:1"], "--nnodes: 3 hosts, and "),
        (["train.stepz=1"], "train.stepz"),
    ],
)
def test_what_a_hostfile_does_not_go_with_is_a_sentence(tiny, tmp_path, capsys, more, sentence):
    path = hostfile(tmp_path, "a slots=1\nb slots=2\n")
    assert main(["train", "--config", str(tiny), "--hostfile", str(path), *more]) == 1
    assert sentence in capsys.readouterr().err


def facts(devices: str = "no Ascend device, 8 NVIDIA devices", **others: str) -> dict[str, object]:
    found = {
        "mm-core": "0.2",
        "torch": "2.9, built for CUDA 12",
        "plugins": "wan 1, vlm 1",
        "devices": devices,
    }
    return {"facts": found | others, "findings": []}


def test_the_doctor_names_each_difference_with_host_and_version():
    documents = {
        Host("a", 8): facts(),
        Host("b", 8): facts(torch="2.8, built for CUDA 12", plugins="wan 2, vlm 1"),
        Host("c", 8): facts("no Ascend device, 4 NVIDIA devices", **{"mm-core": "0.1"}),
        Host("d", 4): facts() | {"findings": [{"severity": "error", "sentence": "no disk", "fix": "buy"}]},
    }
    report = Report()
    compare(report, documents)
    assert [(each.severity, each.sentence) for each in report.findings] == [
        ("error", "b has torch 2.8, and a 2.9"),
        ("error", "b has plugins wan 2, and a wan 1"),
        ("error", "c has mm-core 0.1, and a 0.2"),
        ("error", "c has 4 devices for slots=8"),
        ("error", "d: no disk"),
        ("warning", "d has 8 devices for slots=4"),
    ]


def test_hosts_without_devices_are_compared_too():
    report = Report()
    compare(report, {Host(name, 2): facts("no Ascend device, no NVIDIA device") for name in "ab"})
    assert not report.findings
