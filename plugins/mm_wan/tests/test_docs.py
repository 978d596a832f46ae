"""docs/wan.md is run: each command and each program, on tiny checkpoints in place of published ones."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from mm_wan.testing import make_tiny_checkpoint
from wan_configs import environment

from mm_core.config.load import load_config
from mm_core.device.torch_private import shards_mixed
from mm_core.plan import make_plan
from support import pages as page
from support import warm
from support.scripts import script

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/wan.md"

TWINS = {
    "t2v_1_3b": "t2v_tiny",
    "t2v_1_3b_lora": "t2v_tiny_lora",
    "i2v_14b": "i2v_tiny",
    "ti2v_5b": "ti2v_tiny",
    "t2v_a14b_high": "t2v_a14b_high_tiny",
}
CHECKPOINTS = {
    "t2v": "wan_tiny",
    "t2v_high_low": "wan_tiny_a14b",
    "i2v": "wan_tiny_i2v",
    "ti2v": "wan_tiny_ti2v",
}
FEW = "train.steps=2 checkpoint.every=2 validation.every=2 data.loader.workers=0"


def commands() -> list[str]:
    return [line for b in page.blocks(PAGE) if b.language == "bash" for line in b.text.splitlines()]


def programs() -> dict[str, str]:
    return {b.marker: b.text for b in page.blocks(PAGE) if b.language == "python"}


# -- what it claims --------------------------------------------------------------------------------

ROWS = re.findall(
    r"^\| ((?:`\w+\.yaml`(?:, )?)+) \| .*? \| ([\d,]+) \| ([\d.]+) GiB \| (.*?) \|$", PAGE.read_text(), re.M
)


def test_every_full_size_config_is_in_the_table():
    listed = {name for row in ROWS for name in re.findall(r"`(\w+)\.yaml`", row[0])}
    configs = {path.stem for path in (ROOT / "configs/wan").iterdir()}
    assert listed == {name for name in configs if "tiny" not in name}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row"), [(n, row) for row in ROWS for n in re.findall(r"`(\w+)\.yaml`", row[0])]
)
def test_the_table_is_that_of_the_plan(name, row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no folder of weights
    config = load_config(ROOT / f"configs/wan/{name}.yaml")
    if config.train.base_dtype is not None and not shards_mixed():
        pytest.skip("this torch shards no module of mixed dtypes")
    plan = make_plan(config, 8)
    engine = plan.engine
    state = engine.parameter_bytes + engine.gradient_bytes + engine.optimizer_bytes
    cost = "-"
    if plan.flops is not None:
        cost = f"{plan.flops.useful / plan.global_batch_size / 1e12:,.0f} TFLOP"
    found = (f"{plan.modules[0].parameters:,}", f"{state / 2**30:.2f}", cost)
    assert found == row[1:]


def test_the_annotations_are_those_that_the_dataset_reads(tmp_path):
    (block,) = (b for b in page.blocks(PAGE) if b.language == "json")
    assert all(set(row) == {"path", "cap"} for row in json.loads(block.text))


# -- what it tells to do ---------------------------------------------------------------------------


def tiny(line: str) -> str:
    """The line that is run for a line of the page: tiny twins for what is full-size, and fewer steps."""
    line = line.replace("mm-train ", "mm train ").replace(" --nproc 8", "")
    if found := re.search(r"--config configs/wan/(\w+)\.yaml|validate configs/wan/(\w+)\.yaml", line):
        name = found[1] or found[2]
        twin = TWINS.get(name, name)
        line = line.replace(f"configs/wan/{name}.yaml", f"{ROOT}/configs/wan/{twin}.yaml")
        if found[1]:
            line += f" run.name=wan_{name} {FEW}"
    if line.startswith("mm sample"):
        line += " --steps 2"
    return line.replace("examples/", f"{ROOT}/examples/")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A working folder: the checkpoints of the tiny twins, clips, images."""
    place = tmp_path_factory.mktemp("wan")
    script("examples/real_clips/prepare.py").prepare(place / "data/real_clips")
    for variant, twin in CHECKPOINTS.items():
        make_tiny_checkpoint(place / "ckpt" / twin, variant)
    from PIL import Image

    Image.new("RGB", (64, 48), "red").save(place / "first.png")
    (place / "prompts.txt").write_text("a red circle\na cat\n")
    return place


def run(line: str, place: Path) -> None:
    words = shlex.split(line)
    words[:1] = {"mm": ["-m", "mm_core.cli.main"], "python": []}[words[0]]
    done = warm.run(words, cwd=place, env=environment())
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_every_command_and_program_does_what_the_page_shows(place, monkeypatch):
    """In the page's order; the two programs after the exports that they read."""
    for line in commands():
        if not line.startswith("pip install"):  # tests/repo/test_readme.py installs
            run(tiny(line), place)
    smaller = {"Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "ckpt/wan_tiny"}
    smaller |= {"num_frames=81": "num_frames=5, num_inference_steps=2", "height=480": "height=32"}
    smaller |= {"width=832": "width=32"}
    monkeypatch.chdir(place)
    for text in programs().values():
        for full, little in smaller.items():
            text = text.replace(full, little)
        names: dict[str, object] = {}
        exec(compile(text, "docs/wan.md", "exec"), names)
        assert "pipeline" in names
    assert (place / "cat.gif").stat().st_size > 0
    assert sorted(path.name for path in (place / "runs/wan_i2v_14b").glob("samples/*/*.mp4"))
    for exported in ("wan_t2v_1_3b", "wan_i2v_14b", "wan_t2v_a14b_high", "wan_tuned"):
        assert (place / exported / "model_index.json").is_file()
    assert (place / "wan_t2v_1_3b_lora/pytorch_lora_weights.safetensors").is_file()
