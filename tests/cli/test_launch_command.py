"""`mm launch`: what it prints is read, run beside stand-ins of Slurm's programs, and broken on purpose."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_core.cli.main import main
from mm_core.config.dump import to_mapping
from mm_core.config.load import load_config
from mm_core.errors import MMError
from mm_core.runtime.submit.slurm import seconds_of
from support import kubernetes_jobs

HERE = Path(__file__).parent
Printed = Callable[..., str]


@pytest.fixture
def printed(tiny: Path, capsys: pytest.CaptureFixture[str]) -> Printed:
    """What a command prints for the tiny run on two hosts with two ranks each."""

    def run(scheduler: str, *options: str) -> str:
        command = ["launch", scheduler, "--config", str(tiny), "--nodes", "2", "--nproc", "2", *options]
        code = main(command)
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return run


@pytest.fixture
def refused(tiny: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The error of a command, which prints nothing else."""

    def run(scheduler: str, *options: str) -> str:
        assert (
            main(["launch", scheduler, "--config", str(tiny), "--nodes", "2", "--nproc", "2", *options]) == 1
        )
        out, err = capsys.readouterr()
        assert not out and "Traceback" not in err
        return err

    return run


IMAGE = ("--image", "registry/mm:0.2", "run.dir=runs")


def directives(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))


def test_a_batch_script_asks_for_hosts_devices_a_warning_and_the_queue_again(printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = printed("slurm", "--time", "24:00:00", "run.name=First/Try_1")
    assert directives(text) == {
        "job-name": "first-try-1",
        "nodes": "2",
        "ntasks-per-node": "1",
        "exclusive": "",
        "mem": "0",
        "time": "24:00:00",
        "signal": "USR1@300",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.out",
        "chdir": str(tmp_path),
        "gpus-per-node": "2",
    }
    assert "MM_DEVICE" not in text and "--max-restarts" not in text


def test_devices_and_lines_of_a_users_own_take_the_place_of_others(printed):
    npus = printed("slurm", "--device", "npu", "--sbatch", "mem=200G", "--sbatch=partition=long")
    assert directives(npus).items() >= {("gres", "npu:2"), ("mem", "200G"), ("partition", "long")}
    named = directives(printed("slurm", "--sbatch", "gres=gpu:a100:2", "--max-restarts", "20"))
    assert named["gres"] == "gpu:a100:2" and "gpus-per-node" not in named
    assert not {"gres", "gpus-per-node"} & directives(printed("slurm", "--no-gres")).keys()
    cpus = printed("slurm", "--device", "cpu")
    assert "export MM_DEVICE=cpu\n" in cpus and not {"gres", "gpus-per-node"} & directives(cpus).keys()


PROGRAMS = {
    "scontrol": '[ "$1" = show ] && printf "host-3\\nhost-4\\n" || echo "$@" > "$SEEN/requeued"',
    "srun": 'printf "%s\\n" "$@" > "$SEEN/srun"; [ -z "$SAVES" ] || mkdir -p "$SAVES"; exit "$CODE"',
}


@pytest.mark.parametrize(
    ("code", "saves", "again"),
    [
        (75, "", True),
        (138, "", True),
        (69, "", False),
        (137, "", False),
        (69, "step_2", True),
        (134, "step_2", True),
        (134, "", False),
        (1, "step_2", False),
        (0, "", False),
    ],
)
def test_a_job_waits_in_the_queue_again_where_another_try_helps(printed, tmp_path, code, saves, again):
    runs = tmp_path / "my 'runs'"
    checkpoints = runs / "x/checkpoints"
    (checkpoints / "step_1").mkdir(parents=True)
    script = tmp_path / "job.sh"
    more = ["--max-restarts", "3", f"run.dir={runs}", "run.name=x"]
    script.write_text(printed("slurm", *more))
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SEEN": str(tmp_path),
        "SAVES": str(checkpoints / saves) if saves else "",
        "CODE": str(code),
        "SLURM_JOB_ID": "20007",
        "SLURM_JOB_NODELIST": "host-[3-4]",
    }
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert done.returncode == code and not done.stderr, done.stderr
    assert (tmp_path / "requeued").exists() == again
    words = (tmp_path / "srun").read_text().splitlines()
    assert words[words.index("node") + 1].endswith("mm-train")
    assert words[-4:] == ["--nproc=2", "--nnodes=2", "--rdzv-endpoint=host-3:10007", "--rdzv-id=20007"]
    assert f"run.dir={runs}" in words and "--max-restarts=3" in words


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("5", 300),
        ("5:30", 330),
        ("90:00", 5400),
        ("24:00:00", 86400),
        ("48:00:00", 172800),
        ("1-2", 93600),
        ("1-2:3", 93780),
        ("1-2:3:4", 93784),
        ("UNLIMITED", None),
    ],
)
def test_times_are_read_as_slurm_reads_them(time, seconds):
    assert seconds_of(time) == seconds


@pytest.mark.parametrize("time", ["1d", "25:61:00", "5:00:60", "1-2:60"])
def test_what_is_no_time_is_refused(time):
    with pytest.raises(MMError, match=f"'{time}' is not a time of Slurm"):
        seconds_of(time)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["slurm", "--nodes", "3"],
            "on 3 hosts x 2 ranks (--nproc): train.global_batch_size: global_batch_size 8 does not divide"
            " into micro-batches of 2 on 6",
        ),
        (["slurm", "train.stepz=3"], "train.stepz"),
        (
            ["slurm", "--time", "6:00"],
            "--time: a job of 360 seconds that saves 300 seconds before its end",
        ),
        (["slurm", "--grace", "70000"], "--grace: Slurm cannot warn 70,000 seconds before the end of a job"),
        (["slurm", "--sbatch", "Partition long"], "--sbatch: 'Partition long' is not an option of sbatch"),
        (
            ["slurm", "--sbatch", "array=1-3"],
            "--sbatch array=1-3: the jobs of an array would be one run\n  hint: print a file for each run",
        ),
        (["slurm", "--sbatch", "partition="], "--sbatch: 'partition=' is not an option of sbatch"),
        (
            ["slurm", "--sbatch", "nodes=4"],
            "--sbatch nodes=4: the file sets nodes itself\n  hint: use --nodes",
        ),
        (["kubernetes", *IMAGE, "--claim", "My runs"], "--claim: 'My runs' cannot be used"),
        (
            ["kubernetes", *IMAGE, "--shm", "16 GB"],
            "--shm: '16 GB' cannot be used\n  accepted: a size, as 16Gi",
        ),
        (["kubernetes", *IMAGE, "--image", "a b"], "--image: 'a b' cannot be used"),
        (["kubernetes", *IMAGE, "--namespace", "A"], "--namespace: 'A' cannot be used"),
        (["kubernetes", *IMAGE, "run.dir=/data/runs"], "run.dir: /data/runs is not in the claim"),
        (
            ["kubernetes", *IMAGE, f"plugins.path=[{HERE.parent}/runtime/faulty.py]"],
            "plugins.path: the run needs 1 file that no pod has",
        ),
    ],
)
def test_bad_input_is_a_sentence_and_nothing_is_printed(refused, options, sentence):
    assert sentence in refused(*options)


def test_files_that_only_the_hosts_have_are_named_on_the_error_stream(tiny, capsys):
    command = ["launch", "slurm", "--config", str(tiny), "--nproc", "2", "data.train.annotations=/none.json"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash\n") and "mm: missing here: /none.json (needed to train)\n" in err


def test_a_job_of_kubernetes_holds_the_config_and_has_no_fault(printed, tiny, tmp_path):
    more = ["run.name=Ä 1", "run.dir=runs/@name@"]
    found = kubernetes_jobs.documents(printed("kubernetes", *IMAGE, *more))
    assert kubernetes_jobs.faults(found) == []
    assert [each["metadata"] for each in found.values()] == [{"name": "run-1"}] * 3
    stored = tmp_path / "run.yaml"
    stored.write_text(found["ConfigMap"]["data"]["run.yaml"])
    asked = load_config(tiny, more)
    assert to_mapping(load_config(stored)) == to_mapping(asked)


def test_options_of_kubernetes_are_in_its_file(printed):
    more = ["--device", "npu", "--claim", "team", "--namespace", "vision", "--shm", "64Gi", "--grace", "900"]
    found = kubernetes_jobs.documents(printed("kubernetes", *IMAGE, *more, "--max-restarts", "9"))
    assert kubernetes_jobs.faults(found) == []
    assert {each["metadata"]["namespace"] for each in found.values()} == {"vision"}
    pod = found["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "registry/mm:0.2" and container["args"][-1] == "--max-restarts=9"
    assert container["resources"] == {"limits": {"huawei.com/Ascend910": 2}}
    assert pod["terminationGracePeriodSeconds"] == 900
    work, _, shm = pod["volumes"]
    assert work["persistentVolumeClaim"] == {"claimName": "team"} and shm["emptyDir"]["sizeLimit"] == "64Gi"
    cpu = kubernetes_jobs.documents(printed("kubernetes", *IMAGE, "--device", "cpu"))
    (container,) = cpu["Job"]["spec"]["template"]["spec"]["containers"]
    assert (
        container["resources"] == {"limits": {}} and {"name": "MM_DEVICE", "value": "cpu"} in container["env"]
    )


@pytest.fixture(scope="module")
def job(tiny: Path) -> str:
    """The file of a Job, printed once."""
    from contextlib import redirect_stdout
    from io import StringIO

    with redirect_stdout(StringIO()) as out:
        assert (
            main(["launch", "kubernetes", "--config", str(tiny), "--nodes", "2", "--nproc", "2", *IMAGE]) == 0
        )
    return out.getvalue()


@pytest.mark.parametrize("mistake", kubernetes_jobs.MISTAKES)
def test_a_mistake_in_a_job_is_found(job, mistake):
    found = kubernetes_jobs.documents(job)
    kubernetes_jobs.MISTAKES[mistake](found)
    assert mistake in kubernetes_jobs.faults(found)


@pytest.mark.slow
def test_a_job_and_its_mistakes_are_valid_by_the_published_schema(job):
    validate = pytest.importorskip("kubernetes_validate").validate
    for change in (lambda found: None, *kubernetes_jobs.MISTAKES.values()):
        found = kubernetes_jobs.documents(job)
        change(found)
        for each in found.values():
            validate(each, "1.29", strict=True)
