"""What docs/writing-a-task.md shows runs as it stands there, and prints what the page shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from support.pages import blocks, command_lines
from support.sites import HEAD, Site

PAGE = Path(__file__).parents[2] / "docs/writing-a-task.md"
SAID = {
    "mm plugins check --import --path tones.py": "0 errors",
    "mm validate tones.yaml": "ok",
    "mm-train --config tones.yaml --dry-run": "net              trained            4,260 parameters",
    "mm-train --config tones.yaml": "done: step 5 of 5",
    "mm-train --config tones.yaml --nproc 2 run.name=two": "done: step 5 of 5",
    "mm eval --run runs/tones": "rows  64",
    "mm-train --config pairs.yaml --nproc 2": "done: step 5 of 5",
    "mm plugins test local/pitch --path tones.py": "1 component, 27 checks, 0 failures",
    "mm plugins test local/contrastive --path pairs.py": "1 component, 27 checks, 0 failures",
}
"""Commands of the page -> a part of what they print."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The page's files."""
    made = tmp_path_factory.mktemp("task")
    for block in blocks(PAGE):
        if block.file is not None:
            (made / block.file).write_text(block.text, encoding="utf-8")
    return made


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [found["loss"] for found in map(json.loads, lines) if "loss" in found]


def test_the_page_has_three_plugins_and_two_configs(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["noisy.py", "pairs.py", "pairs.yaml", "tones.py", "tones.yaml"]
    bash = [line for block in blocks(PAGE) if block.language == "bash" for line in block.text.splitlines()]
    assert bash == [*SAID] and {*SAID} <= {*command_lines(PAGE)}


@pytest.mark.slow
def test_the_commands_of_the_page_run(folder: Path, mm) -> None:
    for line in SAID:
        words = line.replace("mm-train", "mm train").split()[1:]
        done = mm(*words, cwd=folder)
        assert done.code == 0, f"{line}: {done.err}"
        assert SAID[line] in done.out + done.err, line
    alone, two, pairs = (losses(folder / "runs" / name) for name in ("tones", "two", "pairs"))
    assert two == pytest.approx(alone, rel=1e-4) and len(alone) == 5
    assert alone[-1] < alone[0] and pairs[-1] < pairs[0]


@pytest.mark.slow
def test_two_ranks_of_the_contrastive_task_are_one(folder: Path, mm) -> None:
    for name, ranks, micro in (("one", 1, 32), ("both", 2, 16)):
        more = [f"run.name={name}", f"train.micro_batch_size={micro}"]
        done = mm("train", "--config", "pairs.yaml", "--nproc", ranks, *more, cwd=folder)
        assert done.code == 0, done.err
    one, both = (losses(folder / "runs" / name) for name in ("one", "both"))
    assert both == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
def test_samples_of_a_task_without_clips_are_refused_by_a_dry_run(folder: Path, mm) -> None:
    samples = "validation={every: 5, samples: {prompts: [a tone]}}"
    done = mm("train", "--config", "tones.yaml", "--dry-run", samples, cwd=folder)
    words = [line.strip() for line in done.err.splitlines()]
    line = (folder / "tones.py").read_text().splitlines().index("class Pitch(TaskModule):") + 1
    assert done.code == 1 and words == [
        f"mm: error: {folder}/tones.py, line {line}: the task Pitch makes no clips",
        "accepted: a task with a method sample(request) that returns one clip for each prompt",
        "hint: write it, or remove validation.samples; `mm sample` prints answers of models of text",
    ]


@pytest.mark.slow
def test_a_check_finds_a_task_without_a_loss(folder: Path, tmp_path: Path, mm) -> None:
    source = (folder / "tones.py").read_text().replace("def losses(", "def rows(")
    (tmp_path / "tones.py").write_text(source)
    done = mm("plugins", "check", "--import", "--path", "tones.py", cwd=tmp_path)
    (line,) = [line for line in done.out.splitlines() if line.startswith("error")]
    assert done.code == 1 and "Pitch does not keep its contract: it has neither losses(batch) nor" in line
    number = source.splitlines().index("class Pitch(TaskModule):") + 1
    assert f'tones.py, line {number}; `python -m pydoc mm_core.contracts.Task` or the page "Task"' in line


@pytest.mark.slow
def test_data_workers_read_the_same_samples(folder: Path, mm) -> None:
    for name, workers in (("here", 0), ("workers", 1)):
        more = [f"run.name={name}", f"data.loader.workers={workers}", "train.steps=2"]
        done = mm("train", "--config", "tones.yaml", *more, cwd=folder)
        assert done.code == 0, done.err
    assert losses(folder / "runs/workers") == losses(folder / "runs/here")


CROSS_ENTROPY = 'nn.functional.cross_entropy(logits, batch["label"], reduction="none")'
AUDIO = 'tone + 0.3 * rng.normal((RATE // 2,), "noise")'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "row"),
    [
        ("def losses(self", "def rows(self", 0),
        ('reduction="none")', 'reduction="mean")', 1),
        (CROSS_ENTROPY, "logits.argmax(1)", 2),
        ("[:, None])\n        return", "[:, None]).detach()\n        return", 3),
        ("self.net = nn.Seq", "self.scale = nn.Parameter(torch.zeros(3))\n        self.net = nn.Seq", 4),
        ("self.net = nn.Seq", "self.towers = nn.ModuleList([nn.Linear(2, 2)])\n        self.net = nn.Seq", 5),
        (AUDIO, "tone[: 4000 - 20 * (index == 1)]", 6),
        ('batch["audio"]', 'batch["auido"]', 7),
    ],
)
def test_the_page_shows_what_is_printed(
    folder: Path, tmp_path: Path, mm, old: str, new: str, row: int
) -> None:
    (table,) = re.findall(r"\| what you wrote .*?\n\|---\|---\|\n(.*?)\n\n", PAGE.read_text(), re.S)
    sentences = re.findall(r"`([^`]+)`", table.splitlines()[row].rpartition(" | ")[2])
    source = (folder / "tones.py").read_text()
    assert old in source
    (tmp_path / "tones.py").write_text(source.replace(old, new, 1))
    (tmp_path / "tones.yaml").write_text((folder / "tones.yaml").read_text())
    settings = ["data.loader.sampler=sequential", "train.global_batch_size=16"]
    done = mm("train", "--config", "tones.yaml", *settings, cwd=tmp_path)
    assert done.code == 1 and "Traceback" not in done.err
    for sentence in sentences:
        assert sentence in done.err
    assert f"{tmp_path}/tones.py, line " in done.err


def derived(tiny: Path, folder: Path, plugin: Path | None, **task: object) -> Path:
    """The tiny run's YAML with another task."""
    config = yaml.safe_load(tiny.read_text())
    config["task"] |= task
    config["plugins"] = {"path": [str(plugin)] if plugin else []}
    config["run"]["dir"] = str(folder)
    path = folder / "derived.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.slow
def test_a_task_derived_from_text_to_video_trains_and_samples(
    folder: Path, tiny: Path, tmp_path: Path, mm
) -> None:
    """Without emphasis it is `text_to_video`; with it, a sample's loss is larger by at most that share."""
    options = ["train.steps=1", "lr_schedule={type: constant}", "log.every=1", "checkpoint.every=1"]
    found = {}
    for name, emphasis in (("plain", 0), ("noisy", 1)):
        given = {"type": "local/noisy", "emphasis": emphasis}
        config = derived(tiny, tmp_path, folder / "noisy.py", **given)
        done = mm("train", "--config", config, *options, f"run.name={name}")
        assert done.code == 0, done.err
        (found[name],) = losses(tmp_path / name)
    assert 1.1 * found["plain"] < found["noisy"] < 2 * found["plain"]
    done = mm("train", "--config", tiny, *options, "run.name=usual", f"run.dir={tmp_path}")
    assert done.code == 0 and losses(tmp_path / "usual") == [found["plain"]], done.err
    wanted = ("--prompt", "a red circle", "--steps", 1, "--out", tmp_path / "clips")
    done = mm("sample", "--run", tmp_path / "noisy", *wanted)
    assert done.code == 0 and len([*(tmp_path / "clips").glob("*.mp4")]) == 1, done.err
    refused = mm("validate", config, "task.emphases=2")
    assert refused.code == 1 and "did you mean 'emphasis'" in refused.err, refused.err


CONFIG = """
from dataclasses import dataclass, field
from mm_core.tasks import SampleConfig, TextToVideoConfig

@dataclass(frozen=True)
class NoisyConfig(TextToVideoConfig):
    emphasis: float = 1.0
    sample: SampleConfig = field(default_factory=lambda: SampleConfig(steps=7))
"""


def test_the_config_of_a_derived_task_is_checked_without_torch(
    site: Site, tiny: Path, tmp_path: Path
) -> None:
    source = HEAD + (
        "@hookimpl\ndef mm_tasks():\n"
        "    return [Component('noisy', 'mm_noisy.task:Noisy', config='mm_noisy.config:NoisyConfig')]\n"
    )
    site.plugin("noisy", source)
    site.module("mm_noisy.config", CONFIG)
    site.module("mm_noisy.task", "from mm_core.tasks import TextToVideo\n\nclass Noisy(TextToVideo): ...\n")
    words = ["validate", str(derived(tiny, tmp_path, None, type="noisy/noisy", emphasis=3))]
    code = (
        "import sys\nfrom mm_core.cli.main import main\n"
        f"assert main({words}) == 0\nassert 'torch' not in sys.modules"
    )
    done = site.run("-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
