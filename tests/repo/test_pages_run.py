"""The commands, programs and configs of the pages run, on tiny runs in the place of large ones.

What other tests run is listed in ELSEWHERE. A page with blocks that is in neither table fails."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from mm_core.cli.main import main
from support.pages import ROOT, Block, blocks, plugin_files

MAKE = "make VENV=$SHELL_VENV --assume-old=$SHELL_VENV/.installed --dry-run "
PIP = "pip install --dry-run --no-deps --no-build-isolation --no-index "
NO_NETWORK = "it needs an empty machine and a network; test_readme.py installs the same folders"
SIZE = "num_frames: 8, height: 16, width: 16"
SHAPES = f"data/shapes/data.json, {SIZE}"


@dataclass(frozen=True)
class Page:
    """How the lines of a page's shell blocks are run.

    Attributes:
        stand_ins: text of a line, its line end included, -> text that is run in its place; applied in order.
        prints: start of a line -> text of its output.
        not_run: start of a line -> why it is not run.
    """

    stand_ins: dict[str, str] = field(default_factory=dict)
    prints: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)


PAGES: dict[str, Page] = {
    "docs/align.md": Page(
        {
            "render.py --out data/shapes\n": "render.py --out data/shapes --clips 64\n",
            "--svg align.svg\n": "--svg align.svg | tee compared; test ${PIPESTATUS[0]} = 1\n",
            "x.yaml --steps 2 --like theirs": "configs/custom_dit/quickstart.yaml --steps 2 --like A",
            "compare ours theirs": "compare ours A",
            "checklist A B\n": "checklist A B | tee listed; test ${PIPESTATUS[0]} = 1\n",
        },
        {
            "mm align compare A B": "FIRST DIFFERENCE\npredictor.blocks.0.norm1 (FP32LayerNorm): its",
            "mm align compare ours": " 0 different",
            "mm align checklist": "config.task.predictor.eps",
            "mm align record --config x.yaml --steps 2 --like": "fed from A",
            "mm align recorder": "",
            "mm-train --config x.yaml --dry-run": "aten::mm",
        },
    ),
    # tests/cli/test_doctor.py runs the rest of the deep part.
    "docs/make-it-fast.md": Page(
        not_run={"python benchmarks/on_device.py": "minutes; tests/repo/test_on_device.py runs it"}
    ),
    "docs/when-something-is-wrong.md": Page({" --deep": ""}, {"mm doctor": "shared memory"}),
    "docs/sampling.md": Page(
        {"--nproc 8": "--nproc 2", "@2000": "@2", "--steps 30": "--steps 2"},
        {
            'mm sample --run runs/x --prompt "a red': "runs/x/samples/seed_0",
            "mm sample --run runs/x --prompts": "2 clips in clips",
            "mm sample --run runs/x@2000": "1 clip in",
        },
    ),
    "docs/checkpoints.md": Page(
        {
            "x.yaml\n": "x.yaml run.name=resumed 'callbacks=[{type: command, run: [\"true\"]}]'\n",
            "--resume runs/x/checkpoints/step_00002000": "--resume runs/x/checkpoints/step_00000003",
            "--resume runs/other": "run.name=another --resume runs/x",
            "--resume never": "run.name=never --resume never",
            "configs/custom_dit/quickstart.yaml --verify-resume 5": "x.yaml --verify-resume 1",
            "~/.local/state": "state",
        },
        {
            "mm-train --config configs": "the resumed run equals the uninterrupted run",
            "grep": "true",
        },
    ),
    "docs/weights.md": Page(
        {
            "ckpt/my-model": "ckpt/wan_tiny_i2v",
            "--nproc 4": "--nproc 2",
            "i2v --config x.yaml\n": "i2v --config clips.yaml run.name=begun\n",
            "--config x.yaml --format": "--config clips.yaml --format",
            "mm-train --config x.yaml": "mm-train --config clips.yaml run.name=begun",
            "x.yaml\n": "clips.yaml\n",
            "runs/x --to transformers": "runs/charts --to transformers",
            "ckpt/base": "ckpt/wan_tiny_i2v",
            "runs/x@1000 runs/x@2000": "runs/clips@1 runs/clips@2 | tee differ; test ${PIPESTATUS[0]} = 1",
            "runs/x@2000": "runs/clips@2",
            "runs/x": "runs/clips",
        },
        {
            "mm import --from ckpt/my-model --config x.yaml": "step_00000000",
            "mm export --run runs/x --to diffusers": "runs/clips/exports/",
            "mm weights diff": "different",
        },
    ),
    "docs/validation.md": Page(
        {
            "@500": "@2",
            "--rows 16": "--rows 4",
            "data/held_out.json, num_frames: 49, height: 480, width: 832": SHAPES,
        },
        {"mm eval": "loss"},
        {
            "mm eval --run runs/x --split test --metric": "test_evaluate_ranks.py does, on a run of classes",
        },
    ),
    "docs/plugins.md": Page(
        {
            # test_custom_dit.py runs the checks of the others, which take half a minute.
            "mm plugins test custom_dit": "mm plugins test custom_dit/wan_transformer",
            "mm plugins new ": 'cd "$(mktemp -d)" && mm plugins new ',
        },
        {
            "mm plugins list": "custom_dit/custom_dit",
            "mm plugins show": "num_layers",
            "mm plugins check": "0 errors",
            "mm plugins test": "0 failures",
            "mm plugins new my-dit": "my-dit: 8 files",
            "mm plugins new my-parts": "my-parts: 10 files",
        },
        {
            "cd my-dit": "tests/repo/test_scaffold_installed.py installs what `mm plugins new` writes,",
            "pytest": "runs its tests,",
            "mm-train": "and trains it",
        },
    ),
    "docs/data.md": Page(
        {'runs/x --prompt "a door': 'runs/ends --prompt "a door', "runs/x": "runs/clips"},
        {"mm sample": "1 clip in"},
    ),
    "docs/long-clips.md": Page({"run.yaml": "x.yaml"}, {"mm-train": "forecast for 2 x H100"}),
    "docs/does-it-fit.md": Page(
        {"run.yaml": "x.yaml train.micro_batch_size=1 train.global_batch_size=16"},
        {
            "mm-train --config run.yaml --dry-run --on 2x8xH100": "forecast for 2 hosts of 8 x H100",
            "mm-train --config run.yaml --dry-run --calibrate": "a step takes about",
        },
    ),
    "docs/hub.md": Page(
        {"run.yaml": "x.yaml"},
        {"mm-train --config run.yaml --dry-run": "forecast for"},
        {"HF_HOME": NO_NETWORK, "mm export": "tests/runs/test_hub_runs.py pushes"},
    ),
    "docs/scale-out.md": Page(
        {
            "run.yaml": "x.yaml train.micro_batch_size=1 engine.sharding_size=null",
            "--nproc 8": "--nproc 4",
            "sharding_size=4": "sharding_size=2",
        },
        {
            "mm-train --config run.yaml --nproc 8 --dry-run engine.preset=ddp": "replicate 4 x shard 1",
            "mm-train --config run.yaml --nproc 8 --dry-run engine.preset=ddp e": "replicate 2 x shard 2",
            "mm-train --config run.yaml --nproc 8 --dry-run engine.preset=zero2": "replicate 1 x shard 4",
            "mm-train --config run.yaml --nproc 8 --dry-run engine.offload": "copies",
        },
    ),
    "docs/launching.md": Page(
        {
            "run.yaml --nodes 4": "x.yaml --nodes 2 --nproc 1",
            "sbatch job.sh": "bash -n job.sh",  # tests/runtime/test_slurm.py submits such a job
            "make image": f"{MAKE} image",
            "run.yaml": "x.yaml",
            "x.yaml\n": "x.yaml run.name=launched train.steps=1\n",
            "--nproc 4 train.steps=100": "--nproc 2 train.steps=1",
            "run.name=try": "run.name=try lr_schedule.min_lr=0",
            "--nproc 64 --dry-run": "--nproc 64 --dry-run train.global_batch_size=128",
            "--nproc-per-node 8": "--nproc-per-node 1",
            "--nproc 8 --max-restarts 20": "--nproc 2 --max-restarts 20",
        },
        {"mm-train --config run.yaml --nproc 64": "64", "make image DEVICE=ascend": "cann:9.1"},
        {
            "mm-train --config run.yaml --nnodes": "tests/runtime/test_launch.py starts two hosts",
            "kubectl": "tests/cli/test_launch_command.py checks such a Job; there is no cluster",
            "docker": "tests/repo/test_image.py runs the steps of the image; there is no docker",
            "mm doctor --hosts": "tests/runs/test_hosts.py has hosts to reach by ssh,",
            "mm-train --config run.yaml --hostfile": "and trains on them",
        },
    ),
    "docs/reading-a-run.md": Page(
        {"runs/shapes": "runs/x", "runs/a runs/b": "runs/x runs/clips"},
        {"mm report runs/shapes": "runs/x/report.html", "mm report runs/a": "compared.html"},
    ),
    "docs/internvl.md": Page(
        {"pip install ": PIP, "tiny.yaml\n": "tiny.yaml train.steps=2 run.name=page_tiny\n"},
        {"mm-train --config configs/internvl/8b.yaml": "8,528,318,464"},
    ),
    "docs/index.md": Page({"make ": MAKE}, {"make train": "mm-train", "make test": "pytest"}),
    "docs/install.md": Page(
        {"make venv": f"{MAKE} venv", "pip install ": PIP},
        {
            "mm plugins check": "0 errors",
            "pip install ./ ./plugins": "mm-core-0.1.0 mm-custom-dit-0.1.0",
            "pip install './[npu]'": "mm-core-0.1.0 mm-custom-dit-0.1.0",
        },
        {
            "conda": NO_NETWORK,
            'pip install "torch': NO_NETWORK,
            "pip install torch": NO_NETWORK,
        },
    ),
    "CONTRIBUTING.md": Page(
        {"make ": MAKE},
        {"make test": "pytest", "make lint": "ruff check", "make docs": "mkdocs build --strict"},
        {".ci/run": "it makes an environment with a network, and runs this test"},
    ),
    "plugins/mm_custom_dit/README.md": Page({"pip install ": PIP}, {"mm plugins show": "num_layers"}),
    "plugins/mm_internvl/README.md": Page(
        {"pip install ": PIP, "runs/internvl_tiny": "runs/charts"},
        {"mm plugins show": "max_length"},
        dict.fromkeys(("python -c", "mm-train"), "docs/internvl.md has the same line"),
    ),
    "plugins/mm_wan/README.md": Page(
        {
            "pip install ": PIP,
            "t2v_tiny.yaml\n": "t2v_tiny.yaml train.steps=2 checkpoint.every=2 validation.every=2\n",
        },
        {"mm plugins show": "preset"},
    ),
    "plugins/mm_deepspeed/README.md": Page(
        not_run=dict.fromkeys(
            ("mm weights show", "mm import", "mm-train"),
            "plugins/mm_deepspeed/tests/test_folders.py runs them on folders that DeepSpeed wrote",
        )
    ),
    "examples/shapes/README.md": Page(
        {"data/shapes": "rendered", "--clips 512": "--clips 16"},
        {"python examples/shapes/judge.py": "16 clips"},
    ),
}

ELSEWHERE = {
    "README.md": "tests/repo/test_readme.py",
    "README.zh-CN.md": "tests/repo/test_readme_languages.py",  # its blocks are those of the English page
    "docs/config.md": "tests/config/test_docs.py",
    "docs/deepspeed.md": "plugins/mm_deepspeed/tests/test_docs.py",
    "docs/hooks.md": "tests/repo/test_site.py",
    "docs/diffusers.md": "plugins/mm_diffusers/tests/test_page.py",
    "docs/diffusers-family.md": "plugins/mm_diffusers/tests/test_page.py",
    "docs/inputs.md": "tests/runs/test_named_inputs.py",
    "docs/lora-for-comfyui.md": "plugins/mm_wan/tests/test_lora_page.py",
    "docs/migrate.md": "plugins/mm_mindspeed/tests/test_page.py",
    "docs/coming-from-mindspeed-mm.md": "plugins/mm_mindspeed/tests/test_page.py",
    "docs/coming-from-other-trainers.md": "plugins/mm_trainers/tests/test_page.py",
    "plugins/mm_mindspeed/README.md": "plugins/mm_mindspeed/tests/test_page.py",
    "plugins/mm_trainers/README.md": "plugins/mm_trainers/tests/test_page.py",
    "docs/optimizers.md": "tests/config/test_training_configs.py",
    "docs/prepare-data.md": "tests/data/test_prepare_page.py",
    "docs/buckets.md": "tests/data/test_buckets_page.py",
    "docs/cache.md": "tests/data/test_cache_page.py",
    "docs/ranks.md": "tests/repo/test_ranks_page.py",
    "docs/transformers.md": "tests/tasks/test_pretrained_page.py",
    "docs/vlm.md": "tests/tasks/test_vlm_page.py",
    "docs/wan.md": "plugins/mm_wan/tests/test_docs.py",
    "docs/wrapping-diffusers.md": "tests/repo/test_diffusers_models.py",
    "docs/writing-a-dit.md": "tests/plugin/test_from_class.py",
    "docs/writing-a-task.md": "tests/contracts/test_task_page.py",
    "docs/your-own-dit.md": "tests/repo/test_scaffold_installed.py",
    "examples/text_classification/README.md": "tests/repo/test_text_classification.py",
}

TINY = {
    "x": f"""
include: configs/custom_dit/quickstart.yaml
run: {{name: x}}
task: {{predictor: {{num_layers: 1}}, sample: {{steps: 2}}}}
data:
  validation: {{type: shapes, {SIZE}, clips: 4}}
  test: {{type: shapes, {SIZE}, clips: 4, seed: 1}}
  loader: {{workers: 0}}
lr_schedule: {{warmup_steps: 0}}
train: {{steps: 3, micro_batch_size: 2, global_batch_size: 4}}
validation: {{every: 1, rows: 2}}
checkpoint: {{every: 1, keep: 9, best: loss}}
ema: {{decay: 0.9}}
""",
    "clips": """
include: configs/wan/i2v_tiny.yaml
run: {name: clips}
task: {sample: {steps: 2}}
data:
  train: {annotations: data/shapes/data.json, num_frames: 5, height: 32, width: 32, fps: 8}
  validation: null
  loader: {workers: 0}
train: {steps: 2, micro_batch_size: 1, global_batch_size: 1}
validation: null
checkpoint: {every: 1, keep: 9}
ema: {decay: 0.9}
""",
    "charts": """
include: configs/internvl/tiny.yaml
run: {name: charts}
data: {loader: {workers: 0}}
train: {steps: 2}
checkpoint: {every: 2}
ema: {decay: 0.9}
""",
}
"""Configs of tiny runs of the three families."""

Shell = Callable[[str], str]


@pytest.fixture(scope="module")
def shell(run: Any, workspace: Path) -> Shell:
    """Runs a shell line in the workspace and returns its output. What lines name is there: the configs of
    TINY and their runs, tiny checkpoints, prompts and images."""
    from mm_internvl.testing import make_tiny_checkpoint, make_tiny_conversations
    from mm_wan.testing import make_tiny_checkpoint as make_tiny_wan

    def call(line: str) -> str:
        # The record of trusted code is the workspace's own, not the person's.
        done = run(line, XDG_STATE_HOME=str(workspace / "state"))
        return done.stdout + done.stderr

    make_tiny_checkpoint(workspace / "ckpt/internvl_tiny")
    make_tiny_conversations(workspace / "data/digits")
    pipeline = make_tiny_wan(workspace / "ckpt/wan_tiny_i2v", "i2v")
    for part in ("text_encoder", "tokenizer"):
        shutil.copytree(pipeline / part, workspace / "ckpt/umt5", dirs_exist_ok=True)
    for name in ("first", "last", "boats", "a", "b"):
        Image.new("RGB", (32, 32), "red").save(workspace / f"{name}.png")
    (workspace / "prompts.txt").write_text("a red circle\na cat\n")
    (workspace / "rows.jsonl").write_text('{"prompt": "two boats", "image": "boats.png"}\n')
    for name, text in TINY.items():
        (workspace / f"{name}.yaml").write_text(text)
        call(f"mm-train --config {name}.yaml")
    make_tiny_wan(workspace / "ckpt/wan_tiny_flf2v", "flf2v")
    begin = "mm import --from ckpt/wan_tiny_flf2v --config configs/wan/flf2v_tiny.yaml"
    call(f"{begin} run.name=ends task.sample.steps=2")
    return call


def lines(page: str) -> list[str]:
    """The commands of a page's shell blocks, without comments and prompts; equal ones once."""
    found: dict[str, None] = {}
    for block in blocks(ROOT / page):
        if block.language in ("bash", "sh", "console"):
            for line in block.text.replace("\\\n", " ").splitlines():
                line = re.sub(r"(^|\s+)#.*$", "", line.removeprefix("$ "))
                found |= {line: None} if line else {}
    return list(found)


def chosen(table: dict[str, str], line: str) -> str | None:
    """The entry of a table for a line: the longest start of it that the table has."""
    starts = [start for start in table if line.startswith(start)]
    return table[max(starts, key=len)] if starts else None


def stand_in(page: str, line: str) -> str:
    text = line + "\n"
    for old, new in PAGES[page].stand_ins.items():
        text = text.replace(old, new)
    return text.strip()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, shell: Shell) -> None:
    for line in lines(page):
        if chosen(PAGES[page].not_run, line) is None:
            printed = shell(stand_in(page, line))
            assert (chosen(PAGES[page].prints, line) or "") in printed, f"{line}\n{printed}"


@pytest.mark.slow
def test_the_drawing_of_align_is_what_the_commands_of_its_page_draw(shell: Shell, workspace: Path) -> None:
    """To make it again, run them and copy align.svg to docs/assets."""
    made = workspace / "align.svg"
    if not made.exists():  # the page's own test has not run
        for line in lines("docs/align.md")[:4]:
            shell(stand_in("docs/align.md", line))
    shown, drawn = (points(path) for path in (ROOT / "docs/assets/align.svg", made))
    assert [point[:2] for point in shown] == [point[:2] for point in drawn] and len(drawn) > 50
    assert [y for *_, y in shown] == pytest.approx(
        [y for *_, y in drawn], abs=3
    )  # rounding of other machines


def points(drawing: Path) -> list[tuple[str, str, float]]:
    """Module, colour and height in px of the points of a drawing of align."""
    found = ElementTree.parse(drawing).iter("{http://www.w3.org/2000/svg}circle")
    return [
        ((each[0].text or "").partition(":")[0], each.get("fill", ""), float(each.get("cy", 0)))
        for each in found
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_entry_is_about_a_line_of_its_page(page: str) -> None:
    text, listed = "\n".join([*lines(page), ""]), PAGES[page]
    for start in (*listed.prints, *listed.not_run):
        assert any(line.startswith(start) for line in lines(page)), start
    for old, new in listed.stand_ins.items():
        assert old in text, old
        text = text.replace(old, new)


# -- every page ------------------------------------------------------------------------------------

RUN = ("bash", "sh", "console", "python", "yaml", "toml")


def test_every_page_with_blocks_is_run_by_a_test() -> None:
    """The pages of kinds show what `mm plugins new` writes, which test_scaffold_installed.py runs."""
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("plugins/*/*.md")]
    pages += ROOT.glob("examples/*/*.md")
    with_blocks = {
        page.relative_to(ROOT).as_posix(): {block.language for block in blocks(page)} & set(RUN)
        for page in pages
    }
    for page, languages in with_blocks.items():
        if not languages or page in ELSEWHERE:
            continue
        if languages & {"bash", "sh", "console"}:
            assert page in PAGES, f"{page}: add its commands to PAGES"
        assert "python" not in languages or page in PROGRAMS, f"{page}: add its programs to PROGRAMS"
    for page, test in ELSEWHERE.items():
        source = (ROOT / test).read_text(encoding="utf-8")
        assert with_blocks[page] and page.rpartition("/")[2] in source, f"{test} does not read {page}"
        assert page not in PAGES
    assert {*PAGES, *PROGRAMS} <= {page for page, languages in with_blocks.items() if languages}


def test_the_commands_of_the_classifier_s_page_are_those_of_its_readme() -> None:
    (shown,) = (b for b in blocks(ROOT / "docs/transformers.md") if b.language == "sh")
    readme = lines("examples/text_classification/README.md")
    assert [re.sub(r"\s+#.*", "", line) for line in shown.text.splitlines()] == readme


# -- YAML ------------------------------------------------------------------------------------------

BASE = f"""
include: {ROOT}/configs/custom_dit/quickstart.yaml
data: {{validation: {{type: video_text, annotations: {SHAPES}}}}}
validation: {{every: 500}}
"""
"""A config over which a fragment is laid that does not name a run."""

BASES = {
    "docs/internvl.md": f"include: {ROOT}/configs/internvl/tiny.yaml\n",
    "docs/writing-a-dit.md": BASE + "task: {scheduler: null}\n",
}


def fragments() -> Iterator[Any]:
    """The YAML blocks of pages that no other test reads; a block of versions of one line is several."""
    for path in sorted(ROOT.glob("docs/*.md")):
        page = path.relative_to(ROOT).as_posix()
        if page in ELSEWHERE:
            continue
        for number, block in enumerate(b for b in blocks(path) if b.language == "yaml"):
            keys = [line.partition(":")[0] for line in block.text.splitlines()]
            versions = block.text.splitlines() if len(keys) > 1 and len(set(keys)) == 1 else [block.text]
            for text in versions:
                yield pytest.param(page, text, id=f"{path.stem}-{number}-{text.split(':')[0]}")


@pytest.mark.parametrize(("page", "text"), list(fragments()))
def test_a_config_of_a_page_is_accepted(
    page: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.yaml").write_text(BASES.get(page, BASE))
    (tmp_path / "my_dit.py").write_text(one_file_plugin())
    (tmp_path / "clips.py").write_text(program("docs/data.md", "class Clips").text)
    laid = text if text.startswith("run:") else f"include: base.yaml\n{text}"
    (tmp_path / "fragment.yaml").write_text(laid)
    assert main(["validate", str(tmp_path / "fragment.yaml")]) == 0, capsys.readouterr().err


def test_the_table_of_a_pyproject_is_the_readme_s() -> None:
    (block,) = (b for b in blocks(ROOT / "docs/plugins.md") if b.language == "toml")
    shown = tomllib.loads(block.text)["project"]
    whole = tomllib.loads(plugin_files(ROOT / "README.md")["mm-small-dit/pyproject.toml"])["project"]
    assert shown["entry-points"] == whole["entry-points"]
    assert set(shown["dependencies"]) <= set(whole["dependencies"])


# -- Python ----------------------------------------------------------------------------------------


def program(page: str, word: str) -> Block:
    """The Python block of a page that has a word."""
    (found,) = (b for b in blocks(ROOT / page) if b.language == "python" and word in b.text)
    return found


def one_file_plugin() -> str:
    """The plugin in one file of docs/plugins.md, with the README's model; the page's YAML sets its width."""
    files = plugin_files(ROOT / "README.md")
    model = files["mm-small-dit/small_dit/model.py"].replace("SmallDiT", "MyDiT")
    sizes = {"in_channels": "12", "text_dim": "64", "depth": "1", "heads": "2", "patch_size": "(2, 2, 2)"}
    start = "def __init__(self, in_channels, text_dim, width, depth, heads, patch_size):"
    defaults = ", ".join(f"{name}={value}" for name, value in sizes.items())
    assert start in model
    model = model.replace(start, f"def __init__(self, width=32, {defaults}):")
    return program("docs/plugins.md", "hookimpl").text + model


@dataclass(frozen=True)
class Program:
    """A Python block that is run as a program.

    Attributes:
        word: text that only this block of the page has.
        stand_ins: text of the block -> what exists here.
        before, after: lines around it, which use what it defines.
        command: what runs it, where `{}` is its file.
        prints: text of the output.
    """

    word: str
    stand_ins: dict[str, str] = field(default_factory=dict)
    before: str = ""
    after: str = ""
    command: str = "python {}"
    prints: str = ""


PREDICTOR = """
config = yaml.safe_load(Path("runs/x/config.yaml").read_text())
predictor = mm_core.build("predictor", config["task"]["predictor"])
"""

PROGRAMS: dict[str, tuple[Program, ...]] = {
    "docs/align.md": (
        Program(
            "Recorder",
            {"from record import": "from mm_core.telemetry.align.recorder import"},
            before="import torch\n"
            "class Model(torch.nn.Linear):\n"
            "    def forward(self, latents, timestep, text):\n"
            "        return super().forward(latents) * timestep + text\n"
            "model = Model(4, 4)\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "loader = [torch.randn(4, 2, 4)] * 2\n",
            after="print(open('theirs/rows_0.jsonl').read().count('grad_norm'))",
            prints="4",
        ),
    ),
    "docs/long-clips.md": (
        Program(
            "context_plan",
            after="from mm_wan.predictor.transformer import WanTransformer\n"
            "own = WanTransformer(num_attention_heads=12, attention_head_dim=6, num_layers=1, ffn_dim=8)\n"
            "split = {k: v for k, v in own.context_plan().split.items() if k != 'token_timesteps'}\n"
            "print(split == context_plan(own).split, own.context_plan().gather == context_plan(own).gather)",
            prints="True True",
        ),
    ),
    "docs/sampling.md": (
        Program(
            "mm_core.sample",
            {'out="clips"': 'out="written"'},
            'import mm_core\nfrom pathlib import Path\ntexts = ["a cat", "a dog"]\n',
            'print(tuple(clip.pixels.shape), len(list(Path("written").glob("*.mp4"))))',
            prints="(3, 8, 16, 16) 2",
        ),
    ),
    "docs/checkpoints.md": (
        Program(
            "load_best",
            before="import mm_core, yaml\n",
            after=PREDICTOR + 'print("best:", load_best(Path("runs/x"), predictor) in (1, 2, 3))',
            prints="best: True",
        ),
    ),
    "docs/weights.md": (
        Program(
            "load_frozen",
            {'"cuda"': '"cpu"', ".cuda()": ".cpu()"},
            after="print(tuple(hidden.shape), mask.any().item())",
            prints="True",
        ),
        Program(
            "mm_core.export(",
            {"runs/x@2000": "runs/clips@2", '"my-model"': '"by-python"'},
            after='from os import listdir\nprint(listdir("by-python/transformer"))',
            prints="diffusion_pytorch_model.safetensors",
        ),
        Program("KeyMap, Rename", after="print(len(keys.rules))", prints="7"),
        Program(
            "def layout",
            after="print([found.folder for found in layout(None, '', None)])",
            prints="transformer_2",
        ),
    ),
    "docs/validation.md": (
        Program(
            "TextMetric",
            after="print(begins_right().name)",
            prints="begins_right",
        ),
        Program(
            "hookimpl", command="MM_PLUGINS=custom_dit mm plugins check --import --path {}", prints="0 errors"
        ),
    ),
    "docs/plugins.md": (
        Program(
            "conformance_tests",
            command="python -c \"import pytest; pytest.main(['-k', 'gradients', '{}'])\"",
            prints="passed",
        ),
        Program(
            "hookimpl", command="MM_PLUGINS=custom_dit mm plugins check --import --path {}", prints="0 errors"
        ),
    ),
    "docs/data.md": (
        Program(
            "class Pairs",
            before='from pathlib import Path\nPath("a.mp4").touch()\n',
            after='Pairs.paths = [Path("a.mp4")]\ntry:\n    Pairs().sample_at(0, None)\n'
            "except DataError as error:\n    print(error)",
            prints="a.mp4: the file is empty",
        ),
        Program(
            "class Clips",
            command="mm-train --config x.yaml run.name=own train.steps=1 plugins.path=[{}]"
            " 'data.train={{type: local/clips}}' 'data.loader={{mode: base}}'",
            prints="data.train is a Dataset, read as it is",
        ),
    ),
    "docs/engine.md": (Program("ShardPlan", after="print(plan.prefetch)", prints="1"),),
    "docs/steering.md": (
        Program("Announce", after='Announce().saved(3, "a-folder")', prints="step 3 is safe in a-folder"),
    ),
    "docs/launching.md": (
        Program(
            "StopFlag",
            stand_ins={'"run.yaml"': '"x.yaml", ["run.name=python"]'},
            after="print(result)",
        ),
    ),
    "docs/writing-a-dit.md": (),  # test_readme.py runs it
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "case"),
    [pytest.param(page, case, id=f"{page}: {case.word}") for page in PROGRAMS for case in PROGRAMS[page]],
)
def test_a_program_of_a_page_runs(page: str, case: Program, shell: Shell, workspace: Path) -> None:
    text = program(page, case.word).text
    for old, new in case.stand_ins.items():
        assert old in text, old
        text = text.replace(old, new)
    if page == "docs/plugins.md" and "hookimpl" in text:
        text = one_file_plugin()
    name = next(
        iter(re.findall(r"target=\"(\w+):", text)), f"test_{Path(page).stem}_program".replace("-", "_")
    )
    file = workspace / f"{name}.py"
    file.write_text(f"{case.before}{text}{case.after}\n")
    assert case.prints in shell(case.command.format(file.name))


def test_every_program_of_a_page_is_in_the_table() -> None:
    for page, cases in PROGRAMS.items():
        count = sum(b.language == "python" for b in blocks(ROOT / page))
        assert count == len(cases) or page == "docs/writing-a-dit.md", page
