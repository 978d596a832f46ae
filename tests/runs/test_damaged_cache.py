"""Caches that are damaged, not finite or of before there were checksums: nothing is read in silence."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import mm_core
from mm_core.cli.main import main
from mm_core.config.sections import RunConfig
from mm_core.contracts import Features
from mm_core.data.cache import shards
from mm_core.data.cache.shards import Keys
from mm_core.data.cache.store import Store
from mm_core.errors import CacheError
from mm_core.loading.caching import build_cache
from mm_core.plan import RunCache, cache_of
from support.caches import written_before
from support.logs import losses

pytestmark = pytest.mark.slow

PREDICTOR = {"type": "custom_dit", "in_channels": 12, "out_channels": 12, "freq_dim": 16, "ffn_dim": 32}
PREDICTOR |= {"num_layers": 1, "num_heads": 1, "head_dim": 16, "patch_size": [1, 2, 2], "text_dim": 16}
TASK = {"type": "text_to_video", "predictor": PREDICTOR, "autoencoder": {"type": "pixel", "spatial": 2}}
TASK |= {"text_encoder": {"type": "bytes", "hidden_size": 16}, "scheduler": {"type": "flow_match"}}


def note(_: object) -> None:
    """Shows no progress."""


@pytest.fixture
def config(tmp_path, monkeypatch) -> RunConfig:
    """A run of six photos, whose cache has files of every kind."""
    monkeypatch.setattr("mm_core.data.cache.hashes._RECENT", 0)  # the photos are new; their hashes are kept
    (tmp_path / "photos").mkdir()
    for number in range(6):
        Image.new("RGB", (16, 16), (40 * number, 0, 90)).save(tmp_path / f"photos/{number}.png")
        (tmp_path / f"photos/{number}.txt").write_text("photo" + " very" * (number % 3))
    train = {"type": "media_text", "sources": [{"annotations": f"{tmp_path}/photos/"}], "num_frames": 1}
    document = {
        "run": {"name": "cached", "dir": str(tmp_path / "runs")},
        "task": TASK,
        "data": {
            "train": {**train, "height": 16, "width": 16},
            "loader": {"workers": 0},
            "cache": {"dir": str(tmp_path / "cache")},
        },
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "train": {"steps": 4, "micro_batch_size": 2},
        "log": {"trackers": []},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    return mm_core.load_config(tmp_path / "run.yaml", [])


def mm_cache(action: str, config: RunConfig, capsys) -> tuple[int, str]:
    """Exit code and output of `mm cache`."""
    yaml_file = Path(config.run.dir).parent / "run.yaml"
    code = main(["cache", action, "--config", str(yaml_file)])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def wanted(cache: RunCache) -> Keys:
    """The keys that a run looks up."""
    return np.concatenate([keys.reshape(-1) for _, _, keys in cache.tables()])


def read(folder: Path, keys: Keys) -> list[Features | None]:
    return Store(folder).get(keys)


def same(found: list[Features | None], before: list[Features | None]) -> bool:
    return all(
        one is not None and one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
        for one, other in zip(found, before, strict=True)
    )


def train(config: RunConfig) -> list[float]:
    """The losses of a new run."""
    name = f"run{len([*Path(config.run.dir).glob('*')])}"
    return losses(mm_core.train(replace(config, run=replace(config.run, name=name))).run_dir)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def flip_features(cache: Path, part: str = "moments") -> Path:
    """Flips the last bit of a shard that has features of this name."""
    (path,) = (s.path for s in Store(cache).shards for _, names in s.groups[:1] if part in names)
    flip(path, path.stat().st_size * 8 - 3)
    return path


def wrong_in_silence(config: RunConfig, keys: Keys, before: list[Features | None]) -> list[str]:
    """Which uses of a cache take something else than what was written, and name no file; a build is one."""
    folder, found, named = Path(config.data.cache.dir), [], []
    try:
        found = read(folder, keys)
    except CacheError as error:
        named.append(str(error))
    kept = [pair for pair in zip(found, before, strict=False) if pair[0] is not None]
    silent = ["read"] * (not same([one for one, _ in kept], [other for _, other in kept]))
    try:
        cache = cache_of(config)[1]
        rows, _ = cache.survey(cache.store.faults())
        silent += ["keys"] * (not np.array_equal(wanted(cache), keys))
        silent += ["status"] * (len(kept) < len(keys) and not any(row.missing or row.stale for row in rows))
        build_cache(config, note)
        silent += ["build"] * (not same(read(folder, keys), before))
    except CacheError as error:
        named.append(str(error))
    return silent + [error for error in named if str(folder) not in error]


def test_of_200_flipped_bits_none_is_read_in_silence(config, tmp_path):
    build_cache(config, note)
    cache, kept, drawn = tmp_path / "cache", tmp_path / "kept", random.Random(0)
    keys = wanted(cache_of(config)[1])
    before = read(cache, keys)
    assert None not in before
    shutil.copytree(cache, kept)
    files = sorted(path.relative_to(kept) for path in kept.rglob("*") if path.is_file())
    assert {str(path.parent) for path in files} == {".", "shards", "facts", "files"}
    flipped: Counter[str] = Counter()
    for number in range(200):
        path = files[number % len(files)]
        flipped[path.suffix] += 1
        size = (kept / path).stat().st_size
        if path.suffix == ".safetensors" and number % 2:  # the header, which is long, and then the rest
            size = min(size, 8 + int.from_bytes((kept / path).read_bytes()[:8], "little"))
        bit = drawn.randrange(size * 8)
        flip(cache / path, bit)
        assert wrong_in_silence(config, keys, before) == [], f"bit {bit} of {path}"
        shutil.rmtree(cache)
        shutil.copytree(kept, cache)
    assert min(flipped[suffix] for suffix in (".safetensors", ".hashes", ".json", ".txt")) > 20, flipped


def test_a_damaged_entry_is_named_and_a_build_encodes_it_alone_again(config, tmp_path, capsys):
    build_cache(config, note)
    assert mm_cache("status", config, capsys)[0] == 0
    once = train(config)
    path = flip_features(tmp_path / "cache")
    with pytest.raises(CacheError, match="the checksum is another one") as caught:
        train(config)
    assert f"{path}, key " in caught.value.where and "`mm cache build`" in str(caught.value)
    code, shown = mm_cache("status", config, capsys)
    assert code == 1 and "1 entry cannot be used" in shown
    assert "latents: 1 not cached: its entry in the cache is damaged" in shown and "photos/" in shown
    code, shown = mm_cache("build", config, capsys)
    assert code == 0 and "encoded 1 latents\n" in shown and "removed 1 entry" in shown
    assert mm_cache("status", config, capsys)[0] == 0
    assert train(config) == once


def before_checksums(cache: Path) -> int:
    """Makes a cache one that was written before there were checksums; the number of its entries."""
    found = Store(cache).shards
    for shard in found:
        written_before(shard.path)
    return sum(len(shard.keys) for shard in found)


def test_entries_of_before_are_read_and_a_build_adds_their_checksums_without_encoding(
    config, tmp_path, capsys
):
    build_cache(config, note)
    once = train(config)
    count = before_checksums(tmp_path / "cache")
    assert train(config) == once
    code, shown = mm_cache("status", config, capsys)
    assert code == 0 and f"{count} entries of before have no checksum (unverified)" in shown
    code, shown = mm_cache("build", config, capsys)
    assert code == 0 and "encoded nothing" in shown and f"gave {count} entries of before a checksum" in shown
    assert "unverified" not in mm_cache("status", config, capsys)[1]
    flip_features(tmp_path / "cache")
    assert mm_cache("status", config, capsys)[0] == 1


def test_a_kill_while_checksums_are_added_loses_nothing(config, tmp_path, monkeypatch):
    build_cache(config, note)
    keys = wanted(cache_of(config)[1])
    before = read(tmp_path / "cache", keys)
    count = before_checksums(tmp_path / "cache")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("mm_core.data.cache.store.remove_shard", killed)
        build_cache(config, note)
    assert same(read(tmp_path / "cache", keys), before)
    built = build_cache(config, note)
    assert not built.encoded and built.summed == count and same(read(tmp_path / "cache", keys), before)


def test_two_builds_that_add_checksums_at_once_keep_each_entry_once(config, tmp_path):
    build_cache(config, note)
    count = before_checksums(tmp_path / "cache")
    command = [sys.executable, "-m", "mm_core.cli.main", "cache", "build", "--config", tmp_path / "run.yaml"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    shown = [child.communicate()[0] for child in both]
    assert [child.returncode for child in both] == [0, 0] and all("encoded nothing" in one for one in shown)
    store = Store(tmp_path / "cache")
    assert len(store) == count and all(shard.sums is not None for shard in store.shards)
    assert not [*(tmp_path / "cache/claims").iterdir()]


def test_an_entry_that_is_not_finite_is_not_there(config, tmp_path, capsys, monkeypatch):
    build_cache(config, note)
    before_checksums(tmp_path / "cache")
    store = Store(tmp_path / "cache")
    (shard,) = (shard for shard in store.shards if "moments" in shard.groups[0][1])
    for fault in (float("nan"), float("-inf")):
        entry = {"moments": torch.full((2, 3), fault)}
        shards.write_shard(shard.path.parent, shard.keys[:1], [entry])
        (bad,) = {*(tmp_path / "cache/shards").iterdir()} - {each.path for each in store.shards}
        bad.replace(tmp_path / "cache/shards/0.safetensors")  # it is found before the other one
        code, shown = mm_cache("status", config, capsys)
        assert code == 1 and "latents: 1 not cached: its entry in the cache has numbers that are not" in shown
        with pytest.raises(CacheError, match="not finite"):
            train(config)
        code, shown = mm_cache("build", config, capsys)
        assert code == 0 and "removed 1 entry" in shown
        assert mm_cache("status", config, capsys)[0] == 0
        store.refresh()


@pytest.fixture
def failing_for(monkeypatch):
    """An autoencoder that returns NaN for the darkest photo, as one in half precision may."""
    from mm_core.diffusion.encoders.pixel import PixelAutoencoder

    encode = PixelAutoencoder.encode

    def overflowing(self, pixels):
        return encode(self, pixels.where(pixels.mean((1, 2, 3, 4), keepdim=True) > -0.75, float("nan")))

    monkeypatch.setattr(PixelAutoencoder, "encode", overflowing)


def test_what_an_encoder_returns_that_is_not_finite_is_told_by_sample_and_not_kept(
    config, tmp_path, capsys, failing_for
):
    code, shown = mm_cache("build", config, capsys)
    assert code == 1 and "left out 1 item: the latents of data.train: " in shown
    assert "photos/0.png are not finite" in shown and "fp32" in shown
    code, shown = mm_cache("status", config, capsys)
    assert code == 1 and "latents: 1 not cached" in shown
    fills = mm_core.load_config(tmp_path / "run.yaml", ["data.cache.missing=encode", "train.steps=1"])
    for _ in range(2):
        try:
            train(fills)
        except mm_core.MMError as error:
            assert "photos/0.png" in str(error)
    assert not [*Store(tmp_path / "cache").faults()]
    assert mm_cache("status", config, capsys)[0] == 1
