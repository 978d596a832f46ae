"""Runs of models with further inputs, one-file plugins: over ranks, cached, in buckets, resumed, sampled."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import yaml
from mm_wan.testing import tiny_vae
from PIL import Image
from safetensors.torch import save_file

from mm_core.builtin.tiny import write_clip
from support.logs import losses
from support.pages import ROOT, blocks

pytestmark = pytest.mark.slow

PAGE = {block.file: block.text for block in blocks(ROOT / "docs/inputs.md") if block.file}

PREDICTOR = {"num_layers": 1, "num_heads": 2, "head_dim": 16, "in_channels": 12, "out_channels": 12}
PREDICTOR |= {"patch_size": [1, 2, 2], "text_dim": 32, "freq_dim": 16, "ffn_dim": 32}
CLIPS = {"num_frames": 4, "height": 16, "width": 16}
HERE = Path(__file__).parent
PIXEL = {"type": "pixel", "spatial": 2}
CROPPED = {"type": "resize_crop", "crop": "random", "flip": 0.5}


def config_of(
    folder: Path,
    plugin: Path,
    predictor: dict[str, Any],
    encoder: dict[str, Any],
    fields: list[Any],
    vae: dict[str, Any] = PIXEL,
) -> Path:
    source = {"annotations": str(folder / "rows.jsonl"), "columns": {"fields": fields}}
    data = {"type": "media_text", "sources": [source], **CLIPS, "num_frames": 4 if vae is PIXEL else 5}
    drawn = {"random_start": True, "transform": CROPPED}
    config = {
        "run": {"name": "run", "dir": str(folder), "seed": 3},
        "plugins": {"path": [str(plugin)]},
        "task": {
            "type": "text_to_video",
            "predictor": {**PREDICTOR, **predictor},
            "autoencoder": vae,
            "text_encoder": encoder,
            "scheduler": {"type": "flow_match"},
            "caption_dropout": 0.3,
            "sample": {"steps": 2, "guidance": 3.0},
        },
        "data": {"train": {**data, **drawn}, "validation": data, "loader": {"workers": 1}},
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "train": {"steps": 4, "micro_batch_size": 4, "global_batch_size": 4},
        "validation": {"every": 4, "rows": 4},
        "checkpoint": {"every": 2},
        "log": {"every": 1},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """Eight clips of 6 frames, 20x24, and a control clip of each."""
    folder, rows = tmp_path_factory.mktemp("clips"), []
    for number in range(8):
        frames = torch.randint(0, 255, (6, 5, 6, 3), generator=torch.Generator().manual_seed(number))
        shown = frames.repeat_interleave(4, 1).repeat_interleave(4, 2).to(torch.uint8)
        write_clip(folder / f"{number}.mp4", shown, 8)
        write_clip(folder / f"{number}_edges.mp4", 255 - shown, 8)
        rows.append({"path": f"{number}.mp4", "cap": f"a bead {number}", "edges": f"{number}_edges.mp4"})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def placed(clips: Path, folder: Path) -> Path:
    for file in clips.iterdir():
        (folder / file.name).hardlink_to(file)
    return folder


@pytest.fixture(scope="module")
def control(clips, tmp_path_factory) -> Path:
    fields = [{"name": "control", "column": "edges"}]
    folder = placed(clips, tmp_path_factory.mktemp("control"))
    encoder = {"type": "bytes", "hidden_size": 32}
    plugin = folder / "control_dit.py"
    plugin.write_text(PAGE["control_dit.py"], encoding="utf-8")
    return config_of(folder, plugin, {"type": "local/control_dit"}, encoder, fields)


@pytest.fixture(scope="module")
def texts(clips, tmp_path_factory) -> Path:
    folder = placed(clips, tmp_path_factory.mktemp("texts"))
    encoder = {"type": "local/two_texts", "hidden_size": 32}
    return config_of(folder, HERE / "two_texts.py", {"type": "local/pooled_dit"}, encoder, [])


@pytest.fixture(scope="module")
def references(clips, tmp_path_factory) -> Path:
    """Rows of none, one and two references of sizes of their own; the encoder's weights are in a file."""
    folder, rows = placed(clips, tmp_path_factory.mktemp("references")), []
    for number, row in enumerate(map(json.loads, (folder / "rows.jsonl").read_text().splitlines())):
        files = [f"{number}_{place}.png" for place in range((0, 1, 2, 2, 0, 1, 1, 2)[number])]
        for place, file in enumerate(files):
            draws = torch.Generator().manual_seed(10 * number + place)
            picture = torch.randint(0, 255, (20 + 20 * place + number, 50 - 4 * number, 3), generator=draws)
            Image.fromarray(picture.to(torch.uint8).numpy()).save(folder / file)
        rows.append({**row, "shown": files if number % 2 else json.dumps(files)})
    (folder / "rows.jsonl").unlink()
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    weights, draws = folder / "seeing.safetensors", torch.Generator().manual_seed(1)
    shapes = {"words.weight": (256, 32), "look.weight": (32, 48), "look.bias": (32,)}
    save_file({name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}, weights)
    encoder = {"type": "local/seeing_text", "from_pretrained": str(weights)}
    fields = [{"name": "references", "column": "shown", "kind": "images", "most": 2}]
    predictor = {"type": "local/references_dit", "in_channels": 16, "out_channels": 16}
    vae = {"type": "wan/vae", **tiny_vae(folder / "vae")}
    return config_of(folder, HERE / "references_dit.py", predictor, encoder, fields, vae)


def trained(mm, config: Path, name: str, *options: object, code: int = 0) -> list[float]:
    done = mm("train", "--config", config, *options, f"run.name={name}")
    assert done.code == code, done.out + done.err
    return losses(config.parent / name)


@pytest.mark.parametrize("case", ["control", "texts", "references"])
def test_ranks_buckets_a_resume_and_the_cache_train_the_same(case, request, mm):
    config = request.getfixturevalue(case)
    plain = trained(mm, config, "plain")
    assert len(plain) == 4
    two = trained(mm, config, "two", "--nproc", 2, "train.micro_batch_size=2")
    assert two == pytest.approx(plain, rel=1e-5)
    sides = [f"data.{split}.{side}=null" for split in ("train", "validation") for side in ("height", "width")]
    most = [f"data.{s}.max_{side}=16" for s in ("train", "validation") for side in ("height", "width")]
    bucketed = trained(mm, config, "bucketed", "data.loader.mode=variable", *sides, *most)
    assert len(bucketed) == 4
    if case == "references":
        frozen = "engine.frozen={autoencoder: sharded, text_encoder: sharded}"
        sharded = trained(mm, config, "sharded", "--nproc", 2, "train.micro_batch_size=2", frozen)
        assert sharded == pytest.approx(plain, rel=1e-5)
    trained(mm, config, "resumed", "--stop-after", 2, code=75)
    assert trained(mm, config, "resumed") == plain
    cache = (f"data.cache.dir={config.parent / 'cache'}", "data.cache.variants=2")  # of two epochs
    done = mm("cache", "build", "--config", config, *cache)
    assert done.code == 0, done.out + done.err
    assert trained(mm, config, "cached", *cache) == pytest.approx(plain, rel=1e-6)


def test_the_page_s_model_is_checked_trained_and_sampled(mm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("draw.py", "control_dit.py", "control.yaml"):
        Path(name).write_text(PAGE[name], encoding="utf-8")
    (commands,) = (block.text for block in blocks(ROOT / "docs/inputs.md") if block.language == "bash")
    draw, check, train, sample = commands.splitlines()
    assert draw == "python draw.py"
    exec(compile(PAGE["draw.py"], "draw.py", "exec"), {})
    for line, more in (
        (train, ["train.steps=3", "lr_schedule.warmup_steps=0"]),
        (check, []),
        (sample, ["--steps", "2"]),
    ):
        program, *words = shlex.split(line)
        done = mm(*(["train"] if program == "mm-train" else []), *words, *more)
        assert done.code == 0, done.out + done.err
    assert len([*Path("clips").glob("*circle.png")]) == 1


def test_a_control_clip_given_by_name_changes_what_is_sampled(control, mm):
    config = control
    samples = {"prompts": ["a", "b"], "inputs": {"control": [str(config.parent / "1_edges.mp4")]}}
    trained(
        mm,
        config,
        "sampled",
        f"validation.samples={json.dumps(samples)}",
        "validation.every=2",
        "train.steps=2",
    )
    run, made = config.parent / "sampled", {}
    assert len([*(run / "samples").glob("step_00000002/*.mp4")]) == 2
    for name in ("1_edges.mp4", "2_edges.mp4"):
        out = config.parent / f"out_{name}"
        given = ("--prompt", "a", "--input", f"control={config.parent / name}", "--out", out)
        done = mm("sample", "--run", run, *given)
        assert done.code == 0, done.out + done.err
        (clip,) = out.glob("*.mp4")
        made[name] = clip.read_bytes()
    assert made["1_edges.mp4"] != made["2_edges.mp4"]
    for given, message in (
        ((), "the predictor needs the input `control`, which the request does not give"),
        (("--input", "contrl=3"), "the request gives `contrl`, which the predictor does not take"),
        (("--input", "control"), "--input control names no field"),
        (("--input", "control=3"), "the input `control` is the number 3"),
        (
            ("--num-frames", "99", "--input", f"control={config.parent / '1_edges.mp4'}"),
            "use a longer video, or lower --num-frames",
        ),
        (("--input", f"control={config.parent / 'none.mp4'}"), "none.mp4"),
    ):
        done = mm("sample", "--run", run, "--prompt", "a", *given)
        assert done.code != 0 and message in done.err and "Traceback" not in done.err, done.err


def alike(one: bytes, other: bytes) -> bool:
    """Whether clips are equal but for the rounding of other batches, which their encoder enlarges."""
    shown = []
    for clip in (one, other):
        with av.open(io.BytesIO(clip)) as opened:
            shown.append(np.stack([frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]))
    return bool(abs(shown[0].astype(int) - shown[1]).mean() <= 0.2)


def test_each_prompt_has_its_own_references_or_none(references, mm):
    folder = references.parent
    shown = {name: str(folder / name) for name in ("1_0.png", "2_0.png", "2_1.png")}
    lists = [[shown["2_0.png"], shown["2_1.png"]], [], [shown["1_0.png"]]]
    samples = {"prompts": ["a", "a", "a"], "inputs": {"references": lists}}
    set_samples = f"validation.samples={json.dumps(samples)}"
    trained(mm, references, "sampled", set_samples, "validation.every=2", "train.steps=2")
    run = folder / "sampled"
    written = sorted((run / "samples/step_00000002").glob("*.mp4"))
    assert len(written) == 3

    def made(name: str, *given: object) -> list[bytes]:
        out = folder / f"out_{name}"
        done = mm("sample", "--run", run, *given, "--out", out, "--nproc", 2 if name == "file" else 1)
        assert done.code == 0, done.err
        return [path.read_bytes() for path in sorted(out.glob("*.mp4"))]

    rows = [{"prompt": "a", "inputs": {"references": files}} for files in lists]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    from_file = made("file", "--prompts", prompts)
    assert from_file == [path.read_bytes() for path in written]
    both = [f"references={shown[name]}" for name in ("2_0.png", "2_1.png")]
    one = f"references={shown['1_0.png']}"
    each = made("each", "--prompt", "a", "--prompt", "a", "--input", *both, "--input", one)
    prompts.write_text("\n".join(map(json.dumps, (rows[0], rows[2]))), encoding="utf-8")
    assert each == made("rows", "--prompts", prompts) and alike(each[0], from_file[0])
    others = [
        made("both", "--prompt", "a", "--input", *both)[0],
        made("one", "--prompt", "a", "--input", one)[0],
    ]
    assert alike(others[0], from_file[0]) and others[0] != others[1]
    assert not alike(made("none", "--prompt", "a")[0], from_file[0])
    for given, message in (
        (("--input", *both, both[0]), "a prompt has 3 pictures of `references`"),
        (("--input", "references=3"), "the input `references` has a value that is not a picture"),
    ):
        done = mm("sample", "--run", run, "--prompt", "a", *given)
        assert done.code != 0 and message in done.err and "Traceback" not in done.err, done.err


def test_a_table_of_more_references_than_the_predictor_takes_is_an_error_before_the_run(references, mm):
    field = {"name": "references", "column": "shown", "kind": "images"}
    table = str(references.parent / "rows.jsonl")
    whole = field | {"most": 2}
    for read, own, message in (
        (
            [],
            {"most": 3},
            "takes up to 2 pictures of their own size of the field `references`, but the dataset",
        ),
        ([], {"most": 1}, "the field `references` has 2 paths, but `most` is 1"),
        ([], {"kind": "clip", "column": "path"}, "the dataset gives one value"),
        (
            [whole],
            {"name": "more", "most": 2},
            "the sources name pictures `more`, but the predictor does not read",
        ),
    ):
        source = [{"annotations": table, "columns": {"fields": [*read, field | own]}}]
        done = mm("train", "--config", references, "--dry-run", f"data.train.sources={json.dumps(source)}")
        assert done.code != 0 and message in done.err and "Traceback" not in done.err, done.err


def test_a_field_that_no_column_gives_is_an_error_before_the_run(control, mm):
    config = control
    source = [{"annotations": str(config.parent / "rows.jsonl")}]
    done = mm("train", "--config", config, "--dry-run", f"data.train.sources={json.dumps(source)}")
    assert done.code != 0
    assert (
        "the predictor needs the field `control` of each sample, which the dataset does not give" in done.err
    )
    assert "`columns: {fields: [{name: control}]}`" in done.err
    done = mm("train", "--config", config, "--dry-run", f"data.validation.sources={json.dumps(source)}")
    assert done.code != 0 and "data.validation: " in done.err and "needs the field `control`" in done.err
