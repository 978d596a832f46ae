"""Runs from the feature cache: the same losses, no encoders, and what does not fit is named."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

import mm_core
from mm_core.builtin.tiny import write_clip
from mm_core.cli.main import main
from mm_core.config.sections import RunConfig
from mm_core.contracts import Randomness
from mm_core.data.cache.claims import Claims
from mm_core.data.cache.store import Store
from mm_core.errors import CacheError, PlanError
from mm_core.loading import caching
from mm_core.loading.caching import build_cache
from mm_core.runtime.process_group import process_group
from mm_core.training.assembly import assemble
from mm_core.training.loop import Training
from support import warm
from support.logs import losses
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

SMALL = {"height": 16, "width": 16, "num_frames": 1}
SHAPES = [(16, 24), (24, 16), (20, 20)]
PREDICTOR = {"type": "custom_dit", "in_channels": 12, "out_channels": 12, "freq_dim": 16, "ffn_dim": 32}
PREDICTOR |= {"num_layers": 1, "num_heads": 1, "head_dim": 16, "patch_size": [1, 2, 2], "text_dim": 16}
TASK = {
    "type": "text_to_video",
    "predictor": PREDICTOR,
    "autoencoder": {"type": "pixel", "spatial": 2},
    "text_encoder": {"type": "bytes", "hidden_size": 16},
    "scheduler": {"type": "flow_match"},
    "caption_dropout": 0.3,
}


def note(_: object) -> None:
    """Shows no progress."""


class Place:
    """Photos and clips of three shapes and two lengths, and runs of them.

    Args:
        folder: where everything is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "photos").mkdir()
        for number in range(9):
            height, width = SHAPES[number % 3]
            Image.new("RGB", (width, height), (20 * number, 0, 90)).save(folder / f"photos/{number}.png")
            (folder / f"photos/{number}.txt").write_text(f"photo {number}")
        self.rows: list[dict[str, Any]] = []
        for number in range(14):
            height, width = SHAPES[number % 3]
            levels = torch.arange((5, 9)[number % 2] + 3).view(-1, 1, 1, 1) * 9 + 5 * number
            write_clip(folder / f"{number}.mp4", levels.expand(-1, height, width, 3).to(torch.uint8), 8)
            self.rows.append({"path": f"{number}.mp4", "cap": f"clip {number}"})

    def config(self, name: str, *overrides: str, **data: Any) -> RunConfig:
        (self.folder / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        sources = [{"annotations": f"{self.folder}/photos/"}, {"annotations": f"{self.folder}/clips.jsonl"}]
        train = {"type": "media_text", "sources": sources, "num_frames": 9, **data}
        if "height" not in data:
            train |= {"max_height": 16, "max_width": 24}
        document = {
            "run": {"name": name, "dir": str(self.folder / "runs")},
            "task": TASK,
            "data": {"train": train, "loader": {"workers": 0}},
            "optimizer": {"type": "adamw", "lr": 1e-3},
            "train": {"steps": 20, "micro_batch_size": 1, "global_batch_size": 2},
            "log": {"trackers": []},
        }
        if "height" not in data:
            document["data"]["loader"]["mode"] = "variable"
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        return mm_core.load_config(path, list(overrides))

    def cached(self, *overrides: str) -> list[str]:
        return [f"data.cache.dir={self.folder / 'cache'}", *overrides]


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


def test_nothing_is_encoded_for_a_run_that_its_schedule_refuses(place, capsys):
    place.config("short", **SMALL)
    words = place.cached("train.steps=3", "lr_schedule.type=constant", "lr_schedule.warmup_steps=100")
    assert main(["cache", "build", "--config", str(place.folder / "short.yaml"), *words]) == 1
    assert "warmup_steps is 100, but the run has only 3 steps" in capsys.readouterr().err
    assert not (place.folder / "cache").exists()


@contextmanager
def assembled(config: RunConfig) -> Iterator[Training]:
    """A run before its first step."""
    with process_group(None):
        made = assemble(config)
        yield made
        made.between.close(None)
        made.reporter.close("stopped")


def photos_of(place: Place) -> dict[str, Any]:
    """The photos as a dataset of their own."""
    photos = {"type": "media_text", "sources": [{"annotations": f"{place.folder}/photos/"}]}
    return photos | {"num_frames": 1, "max_height": 16, "max_width": 24}


def train(config: RunConfig) -> list[float]:
    return losses(mm_core.train(config).run_dir)


def test_buckets_variants_and_dropout_give_the_losses_without_a_cache(place):
    held = ["validation={every: 20, timesteps: [0.5]}", f"data.validation={json.dumps(photos_of(place))}"]
    drawn = {"random_start": True}
    for row in place.rows:
        row["cap"] = [row["cap"], f"the {row['cap']}, which has a longer caption"]
    variants = place.cached("data.cache.variants=2")
    built = build_cache(place.config("built", *held, *variants, **drawn), note)
    assert 9 + 14 + 1 < built.encoded["text states"] <= 9 + 28 + 1 and built.encoded["latents"] > 9 + 14
    online, cached = (
        mm_core.train(place.config(name, *held, *more, **drawn)).run_dir
        for name, more in (("online", []), ("cached", variants))
    )
    assert len(losses(online)) == 20 and losses(cached) == pytest.approx(losses(online), abs=1e-6)
    of = "validation/loss"
    assert losses(cached, of) == pytest.approx(losses(online, of), abs=1e-6)
    assert len(losses(cached, of)) == 1


def test_the_plan_notes_that_the_uses_of_a_row_share_what_is_drawn_for_it(place, capsys):
    """With a weight, the uncached run draws a caption for each use: the losses differ."""
    for row in place.rows:
        row["cap"] = [row["cap"], f"the {row['cap']}, which has a longer caption"]
    place.config("written")
    sources = [{"annotations": f"{place.folder}/clips.jsonl", "weight": 2}]
    build_cache(place.config("built", *place.cached(), sources=sources), note)
    online, cached = (
        train(place.config(name, *more, sources=sources))
        for name, more in (("online", []), ("cached", place.cached()))
    )
    assert cached != pytest.approx(online, abs=1e-6)
    command = ["train", "--config", f"{place.folder}/cached.yaml", *place.cached(), "--dry-run"]
    capsys.readouterr()
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "data.train: the cache draws starts, crops, captions and tags for each row" in told
    assert "from epoch 1 on, what is drawn for a row" in told


def test_two_ranks_with_workers_read_one_cache(place):
    build_cache(place.config("built", *place.cached()), note)
    found = {}
    for name, more in (("online", []), ("cached", place.cached())):
        place.config(name)
        command = ["train", "--config", f"{place.folder}/{name}.yaml", "--nproc", "2", *more]
        result = warm.mm(*command, "data.loader.workers=1", f"run.name={name}")
        assert result.returncode == 0, result.stdout + result.stderr
        found[name] = losses(place.folder / "runs" / name)
    assert found["cached"] == pytest.approx(found["online"], abs=1e-6)


@pytest.mark.parametrize("missing", ["encode", "error"])
def test_ranks_that_look_at_different_moments_do_the_same(place, missing):
    build_cache(place.config("cached", *place.cached(), **SMALL), note)
    cache, aside = place.folder / "cache", place.folder / "aside"
    holding = next(s.path for s in Store(cache).shards if len(s.groups[0][1]) == 2)  # of texts: states, mask
    holding.rename(aside)
    given = (place.folder / "cached.yaml", cache, aside, missing)
    first, second = run_ranks(Path(__file__).with_name("cached_ranks.py"), 2, *given)
    assert first == second
    assert ("['text_encoder'] True" if missing == "encode" else "text states: 8 not cached") in first


def test_two_ranks_build_a_cache_and_one_that_is_complete_encodes_nothing(place):
    place.config("built", *place.cached())
    command = ["cache", "build", "--config", f"{place.folder}/built.yaml", *place.cached()]
    result = warm.mm(*command, "--nproc", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "encoded 23 latents, 24 text states" in result.stdout
    assert re.search(r"samples: 23 of 23, [\d.]+ k?B each", result.stdout)
    again = warm.mm(*command)
    assert "encoded nothing: everything was there" in again.stdout
    status = warm.mm(*["cache", "status", *command[2:]])
    assert status.returncode == 0 and "0 entries that this run does not need" in status.stdout


def test_nothing_is_loaded_that_nothing_needs(place, capsys):
    config = place.config("built", *place.cached())
    build_cache(config, note)
    with assembled(config) as made:
        task = made.task
        assert task.frozen == () and task.text_encoder.table is None
    run = [f"{place.folder}/built.yaml", *place.cached(), "engine={frozen: {text_encoder: replicated}}"]
    assert main(["train", "--dry-run", "--config", *run]) == 0
    shown = capsys.readouterr().out
    assert "not loaded: autoencoder, text_encoder" in shown and "frozen" not in shown.partition("memory")[2]


def test_prompts_are_cached_too(place, same_clips):
    samples = ["validation={every: 20, samples: {prompts: [a red circle], steps: 2, guidance: 3}}"]
    samples += ["task.sample={num_frames: 5, height: 16, width: 16, fps: 8}"]
    config = place.config("cached", *samples, *place.cached())
    build_cache(config, note)
    with assembled(config) as made:
        assert made.task.frozen == ("autoencoder",)
    clips = [
        mm_core.train(each).run_dir / "samples/step_00000020"
        for each in (place.config("online", *samples), config)
    ]
    assert same_clips(*clips)


def test_what_is_missing_is_named_with_its_reason(place):
    config = place.config("cached", *place.cached())
    with pytest.raises(CacheError, match="there is no feature cache"):
        mm_core.train(config)
    build_cache(config, note)
    place.rows[3]["cap"] = "another caption"
    with pytest.raises(CacheError) as caught:
        mm_core.train(place.config("cached", *place.cached()))
    assert "text states: 1 not cached: not encoded yet, or its content has changed" in str(caught.value)
    assert "3.mp4" in str(caught.value) and "latents" not in str(caught.value)
    with pytest.raises(CacheError, match="23 not cached: its frames, size or transform have changed"):
        mm_core.train(place.config("cached", *place.cached(), fps=7))
    with pytest.raises(
        CacheError, match=r"the text_encoder has changed \(text_encoder.max_length: 128 -> 9\)"
    ):
        mm_core.train(place.config("cached", *place.cached("task.text_encoder.max_length=9")))


def features(cache: Path) -> int:
    """Entries of a cache that are no hashes of files, which a second start remembers."""
    return len(Store(cache))


def test_a_run_may_fill_the_cache_as_it_trains(place):
    fills = place.cached("data.cache.missing=encode")
    online = train(place.config("online"))
    assert train(place.config("first", *fills)) == pytest.approx(online, abs=1e-6)
    once = features(place.folder / "cache")
    assert train(place.config("second", *fills)) == pytest.approx(online, abs=1e-6)
    assert features(place.folder / "cache") == once
    assert build_cache(place.config("built", *place.cached()), note).encoded.get("latents", 0) <= 3


def test_a_sample_that_cannot_be_read_is_replaced_as_without_a_cache(place, capsys):
    for name in ("photos/4.png", "3.mp4"):
        path = place.folder / name
        path.write_bytes(path.read_bytes()[:60])
    built = build_cache(place.config("cached", *place.cached(), **SMALL), note)
    assert built.unreadable == 2 and built.encoded["latents"] == 21
    assert build_cache(place.config("cached", *place.cached(), **SMALL), note).unreadable == 0
    assert main(["cache", "status", "--config", f"{place.folder}/cached.yaml", *place.cached()]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "latents" in line)
    assert line.split() == ["train", "latents", "21", "0", "0", "2"]
    more = ["data.loader.max_failed_share=0.5"]
    online = train(place.config("online", *more, **SMALL))
    assert train(place.config("cached", *more, *place.cached(), **SMALL)) == pytest.approx(online, abs=1e-6)
    listed = [(place.folder / f"runs/{name}/skipped.jsonl").read_text() for name in ("online", "cached")]
    reasons = [[json.loads(line)["reason"] for line in each.splitlines()] for each in listed]
    assert reasons[0] == reasons[1] and len(reasons[0]) > 0


def changed_after_the_keys(monkeypatch, change):
    """Has files changed by someone else once a build knows what it is to encode."""
    real = caching.cache_of

    def opened(*given, **more):
        found = real(*given, **more)
        change()
        return found

    monkeypatch.setattr(caching, "cache_of", opened)


def test_what_changes_or_cannot_be_read_during_a_build_is_left_out(place, monkeypatch, capsys):
    photos = place.folder / "photos"

    def change():
        Image.new("RGB", (24, 16), (1, 2, 3)).save(photos / "0.png")
        (photos / "3.txt").write_text("another caption")
        for name in ("4.png", "5.png"):
            (photos / name).unlink()
        (photos / "5.png").symlink_to("5.png")  # the system refuses to open it
        path = place.folder / "3.mp4"
        path.write_bytes(path.read_bytes()[:60])  # damaged, but not what the keys are of

    before = (photos / "5.png").read_bytes()
    changed_after_the_keys(monkeypatch, change)
    config = place.config("cached", *place.cached(), **SMALL)
    built = build_cache(config, note)
    assert built.encoded == {"latents": 19, "text states": 22} and built.unreadable == 0
    whys = sorted(built.left_out.values())
    assert len(whys) == 6 and whys.count("its file or caption was changed") == 2, whys
    monkeypatch.undo()

    (photos / "4.txt").unlink()  # as its picture
    (photos / "5.png").unlink()
    (photos / "5.png").write_bytes(before)  # the share is there again
    built = build_cache(config, note)
    assert built.encoded == {"latents": 2, "text states": 2} and built.unreadable == 1 and not built.left_out

    (photos / "6.txt").write_text("yet another")
    changed_after_the_keys(monkeypatch, lambda: (photos / "6.txt").write_text("and again"))
    assert main(["cache", "build", "--config", f"{place.folder}/cached.yaml", *place.cached()]) == 1
    assert "left out 1 item: its file or caption was changed" in capsys.readouterr().err


def test_a_build_computes_as_training_does_and_closes_shards_by_their_bytes(place, monkeypatch):
    monkeypatch.setattr(caching, "SHARD_BYTES", 1)
    before = torch.get_float32_matmul_precision()
    try:
        build_cache(place.config("built", *place.cached("run.float32_matmul=high"), **SMALL), note)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    sizes = [len(shard.keys) for shard in Store(place.folder / "cache").shards]
    assert sizes.count(1) == 23 and sum(sizes) == 23 + 24
    with pytest.raises(CacheError, match=r"has changed \(float32_matmul: high -> highest\)"):
        mm_core.train(place.config("cached", *place.cached(), **SMALL))


def test_what_changes_while_a_run_fills_the_cache_is_trained_on_and_not_kept(place):
    config = place.config("first", *place.cached("data.cache.missing=encode"), **SMALL)
    with assembled(config) as made:
        for number in range(9):
            (place.folder / f"photos/{number}.txt").write_text("another caption")
            Image.new("RGB", (24, 16), (1, 2, number)).save(place.folder / f"photos/{number}.png")
        for _ in range(40):
            next(made.batches)
        made.between.callbacks.call("run_ended", 20, None)
    place.config("again", *place.cached(), **SMALL)
    built = build_cache(place.config("again", *place.cached(), **SMALL), note)
    assert built.encoded == {"latents": 9, "text states": 1}


def test_only_the_empty_caption_may_be_missing(place):
    build_cache(place.config("built", *place.cached("task.caption_dropout=0")), note)
    held = ["validation={every: 20, timesteps: [0.5]}", f"data.validation={json.dumps(photos_of(place))}"]
    online = train(place.config("online", *held))
    with pytest.raises(CacheError, match=r"text states: 1 not cached: not encoded yet.*''"):
        train(place.config("cached", *place.cached()))
    fills = place.cached("data.cache.missing=encode")
    assert train(place.config("cached", *held, *fills)) == pytest.approx(online, abs=1e-6)
    with assembled(place.config("again", *fills)) as made:
        assert made.task.frozen == ()


def test_reasons_tell_a_variant_from_another_autoencoder(place):
    drawn = {"random_start": True}
    build_cache(place.config("built", *place.cached(), **drawn), note)
    with pytest.raises(CacheError) as caught:
        mm_core.train(place.config("more", *place.cached("data.cache.variants=2"), **drawn))
    assert "latents: 14 not cached: other random starts or crops of it are there" in str(caught.value)
    assert "has changed (" not in str(caught.value)


def test_a_file_or_caption_without_a_hash_is_replaced_as_without_a_cache(place):
    (place.folder / "3.mp4").unlink()
    (place.folder / "3.mp4").mkdir()
    (place.folder / "photos/4.txt").write_bytes(b"\xff\xfe")
    more = ["data.loader.max_failed_share=0.5"]
    online = train(place.config("online", *more, **SMALL))
    assert build_cache(place.config("cached", *place.cached(), **SMALL), note).unreadable == 2
    assert train(place.config("cached", *more, *place.cached(), **SMALL)) == pytest.approx(online, abs=1e-6)


def test_a_prune_for_two_configs_leaves_a_running_one_what_it_needs(place):
    config = place.config("cached", *place.cached())
    build_cache(config, note)
    build_cache(place.config("other", *place.cached(), fps=7), note)
    with assembled(config) as made:
        assert main(["cache", "prune", "--config", f"{place.folder}/cached.yaml", *place.cached()]) == 0
        for _ in range(20):
            next(made.batches)


def test_a_task_of_a_plugin_takes_part(place):
    plugin = [f"plugins.path=[{Path(__file__).with_name('cached_task.py')}]", "train.micro_batch_size=2"]
    task = {"task": {"type": "local/letters", "text_encoder": TASK["text_encoder"]}}
    of = [*plugin, f"task={json.dumps(task['task'])}"]
    online = train(place.config("online", *of, **SMALL))
    assert build_cache(place.config("built", *of, *place.cached(), **SMALL), note).encoded == {"means": 23}
    assert train(place.config("cached", *of, *place.cached(), **SMALL)) == pytest.approx(online, abs=1e-6)
    trained = json.dumps(task["task"] | {"type": "local/trained"})
    with pytest.raises(PlanError, match="the text_encoder is trained"):
        mm_core.train(place.config("trained", *plugin, f"task={trained}", *place.cached(), **SMALL))


def test_data_that_describe_no_sample_are_refused(place):
    plugin = place.folder / "own.py"
    plugin.write_text(
        "from mm_core import Component, hookimpl\n"
        "from mm_core.contracts import DatasetBase\n"
        "@hookimpl\n"
        "def mm_datasets():\n"
        "    return [Component(name='own', target='own:Own')]\n"
        "class Own(DatasetBase):\n"
        "    def __len__(self):\n"
        "        return 4\n"
        "    def __getitem__(self, index):\n"
        "        return {}\n"
    )
    own = [
        f"plugins.path=[{plugin}]",
        "data.train={type: local/own}",
        "data.loader={workers: 0, mode: sampler}",
    ]
    config = place.config("own", *own, *place.cached("data.cache.missing=encode"))
    with pytest.raises(PlanError, match="samples of Own cannot be cached") as caught:
        mm_core.train(config)
    assert caught.value.where == "data.train"
    base = [*own[:2], "data.loader={workers: 0, mode: base}"]
    with pytest.raises(PlanError, match="cannot be cached"):
        mm_core.train(place.config("base", *base, *place.cached("data.cache.missing=encode")))


@pytest.mark.parametrize("missing", ["error", "encode"])
def test_a_cache_that_was_pruned_under_a_run_ends_it_with_a_sentence(place, missing):
    config = place.config("cached", *place.cached(f"data.cache.missing={missing}"))
    without_empty = ["task.caption_dropout=0"] * (missing == "encode")  # so that texts alone are encoded
    build_cache(place.config("built", *place.cached(*without_empty)), note)
    with assembled(config) as made:
        for shard in (place.folder / "cache/shards").iterdir():
            shard.unlink()
        with pytest.raises(CacheError, match=r"latents of .* no longer in the cache(.|\n)*`mm cache prune`"):
            next(made.batches)


# -- builds that die, and builds that meet -------------------------------------------------------


def build_command(config: Path, cache: Path, *more: str) -> list[str]:
    python = [sys.executable, "-m", "mm_core.cli.main"]
    return [*python, "cache", "build", "--config", str(config), f"data.cache.dir={cache}", *more]


@pytest.fixture
def drawn(tmp_path) -> Path:
    """A run of 600 drawn clips."""
    data = {"type": "shapes", "clips": 600, "num_frames": 4, "height": 16, "width": 16}
    document = {
        "run": {"name": "drawn", "dir": str(tmp_path / "runs")},
        "task": TASK,
        "data": {"train": data, "loader": {"workers": 0}},
        "train": {"steps": 2, "micro_batch_size": 4},
    }
    (tmp_path / "drawn.yaml").write_text(yaml.safe_dump(document))
    return tmp_path / "drawn.yaml"


def entries(cache: Path) -> int:
    return len(Store(cache)) if (cache / "format.txt").exists() else 0


@pytest.mark.parametrize("moments", [2, 20])
def test_a_build_that_is_killed_at_any_moment_goes_on_where_it_was(drawn, tmp_path, moments):
    cache, chunk = tmp_path / "cache", 10
    wanted = 600 + 26 + 1
    began = time.monotonic()
    subprocess.run(build_command(drawn, tmp_path / "whole"), check=True, capture_output=True)
    whole = time.monotonic() - began
    assert entries(tmp_path / "whole") == wanted
    for turn in range(moments):
        child = subprocess.Popen(
            build_command(drawn, cache), stdout=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(whole * (0.4 + 0.6 * Randomness(turn).uniform("kill")))
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        entries(cache)  # whatever is there can be read
    last = subprocess.run(build_command(drawn, cache), check=True, capture_output=True, text=True)
    assert "samples: 600 of 600" in last.stdout
    found = Store(cache)
    assert 0 <= len(found) - wanted <= moments * chunk  # at most one shard of each build was written twice
    mm_core.train(mm_core.load_config(drawn, [f"data.cache.dir={cache}"]))
    assert not [*(cache / "claims").iterdir()]
    assert not [*(cache / "shards").glob(".*")]


def test_a_build_that_was_killed_once_its_work_was_written_leaves_no_claim(place):
    config, found = place.config("built", *place.cached()), Claims(place.folder / "cache/claims")
    build_cache(config, note)
    (found.folder / "texts-8-00").write_text(
        f"{os.getpid()} 5@{socket.gethostname()}"
    )  # as if from a dead process
    build_cache(config, note)
    assert not [*found.folder.iterdir()]


def test_two_builds_at_once_share_the_work(drawn, tmp_path):
    cache = tmp_path / "cache"
    both = [
        subprocess.Popen(build_command(drawn, cache), stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [child.communicate()[0] for child in both]
    assert [child.returncode for child in both] == [0, 0]
    assert entries(cache) == 627, outputs
