"""What the keys of the feature cache are made of, and the hashes of files that it remembers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mm_core.builtin.configs.data import MediaSource
from mm_core.contracts import Source
from mm_core.data.cache import keys as keys_module
from mm_core.data.cache.hashes import FileHashes, Span
from mm_core.data.cache.keys import component_facts, libraries
from mm_core.data.cache.reading import _may_pass
from mm_core.data.cache.rows import CacheRows, PartKey
from mm_core.data.cache.shards import KEY
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.media.readers import PyAVReader
from mm_core.errors import CacheError, DataError, RunWarning
from mm_core.schema.fields import ComponentConfig

LATENTS, TEXTS = PartKey("latents", False, bytes(16)), PartKey("text states", True, bytes(range(16)))


def old(path: Path, content: bytes, age: int = 100) -> Path:
    """A file that was written some seconds ago, so that its hash is remembered."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    changed = path.stat().st_mtime - age
    os.utime(path, (changed, changed))
    return path


# -- hashes of files ----------------------------------------------------------------------------------


def test_a_known_file_is_read_once_and_a_changed_one_again(tmp_path):
    files = [Span(old(tmp_path / name, name.encode())) for name in "abc"]
    hashes = FileHashes(tmp_path / "files")
    first = hashes.of([*files, Span(tmp_path / "none")])
    assert hashes.read == 3 and first[3] is None and len({*first}) == 4
    hashes.save()
    again = FileHashes(tmp_path / "files")
    assert again.of(files) == first[:3] and again.read == 0
    old(tmp_path / "b", b"B", age=50)
    found = again.of(files)
    assert again.read == 1 and found[1] != first[1] and (found[0], found[2]) == (first[0], first[2])
    assert again.of([Span(tmp_path / "a", 0, 1)]) == [first[0]]  # the same byte, of an archive


def test_a_file_that_may_change_again_at_the_same_time_is_not_remembered(tmp_path):
    hashes = FileHashes(tmp_path / "files")
    hashes.of([Span(old(tmp_path / "new", b"1", age=0))])
    hashes.save()
    assert not (tmp_path / "files").exists()
    os.utime(old(tmp_path / "oldest", b"1"), (0, 0))  # as some archives unpack
    assert hashes.of([Span(tmp_path / "oldest")]) != [None]


def test_damaged_hashes_are_forgotten_and_many_files_of_them_are_joined(tmp_path):
    spans = [Span(old(tmp_path / f"{number}", b"%d" % number)) for number in range(40)]
    hashes = FileHashes(tmp_path / "files")
    wanted = []
    for span in spans:
        wanted += hashes.of([span])
        hashes.save()
    assert len([*(tmp_path / "files").iterdir()]) < 35
    assert FileHashes(tmp_path / "files").of(spans) == wanted
    for path in (tmp_path / "files").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = FileHashes(tmp_path / "files")
    assert again.of(spans) == wanted and again.read == 40


def test_a_cache_that_cannot_be_written_keeps_the_hashes_in_memory(tmp_path):
    (tmp_path / "files").write_text("no folder")
    hashes, span = FileHashes(tmp_path / "files"), Span(old(tmp_path / "a", b"a"))
    found = hashes.of([span])
    hashes.save()
    assert hashes.of([span]) == found and hashes.read == 1


# -- components ---------------------------------------------------------------------------------------


def facts(folder: Path, **options: object) -> dict[str, object]:
    section = ComponentConfig("text_encoder", "own/encoder", {"from_pretrained": str(folder), **options})
    return component_facts(section, object(), section.type, FileHashes(folder.parent / "files"))


@pytest.fixture
def folder(tmp_path) -> Path:
    names = ["config.json", "a/model.bin", "b/model.bin", "model.pt", "model.pth", "spiece.model"]
    for name in [*names, "tokenizer.spm", "chat_template.jinja", "cl100k.tiktoken", "merges", "x.gguf"]:
        old(tmp_path / "model" / name, name.encode())
    return tmp_path / "model"


def test_every_file_of_a_folder_is_in_the_key_but_what_no_loader_reads(folder):
    before = facts(folder)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.write_bytes(content + b"!")
        assert facts(folder) != before, path
        old(path, content)
    for name in ("README.md", "LICENSE", ".git/config", ".cache/huggingface/a.metadata", "a/figure.png"):
        old(folder / name, b"what nothing reads")
    assert facts(folder) == before


def test_files_are_known_by_their_place_in_the_folder(folder, tmp_path):
    before = facts(folder)
    shutil.copytree(folder, tmp_path / "moved")
    assert facts(tmp_path / "moved") == before
    (folder / "a/model.bin").rename(folder / "c")
    (folder / "b/model.bin").rename(folder / "a/model.bin")
    (folder / "c").rename(folder / "b/model.bin")
    assert facts(folder) != before


def test_links_of_a_download_are_known_by_their_names(folder, tmp_path):
    before = facts(folder)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/1f3a"
    blobs.mkdir()
    for number, path in enumerate(path for path in sorted(folder.rglob("*")) if path.is_file()):
        shutil.move(path, blobs / f"{number}")
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blobs / f"{number}")
    assert facts(snapshot) == before


def test_a_component_that_lists_its_files_is_asked(folder, tmp_path):
    class Listing:
        def files(self):
            return [folder / "config.json", tmp_path / "words/tokenizer.json"]

    def key():
        options = {"from_pretrained": str(folder), "tokenizer": str(tmp_path / "words"), "dtype": "bf16"}
        section = ComponentConfig("text_encoder", "own/encoder", options)
        return component_facts(section, Listing(), section.type, FileHashes(tmp_path / "files"))

    with pytest.raises(CacheError, match=r"files of own/encoder cannot be read: .*tokenizer\.json"):
        key()
    old(tmp_path / "words/tokenizer.json", b"words")
    before = key()
    assert before["options"] == {"dtype": "bf16"}
    old(folder / "model.pt", b"which it does not read")
    assert key() == before
    old(tmp_path / "words/tokenizer.json", b"others")
    assert key() != before


def test_versions_that_change_results_are_in_the_key(monkeypatch):
    assert {"diffusers", "transformers", "Pillow", "FFmpeg"} == libraries(False).keys()
    before = libraries(True)
    assert before == {name: libraries(False)[name] for name in ("diffusers", "transformers")}
    for number, same in (("4.99.1", True), ("4.99.7", True), ("5.0.0", False)):
        monkeypatch.setattr(keys_module, "version", lambda name, number=number: number)
        assert (libraries(True)["transformers"] == "4.99") == same


# -- samples ------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path, monkeypatch) -> CacheRows:
    """40 pictures, of which one is missing."""
    listed = []
    for number in range(40):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
        listed.append({"path": f"{number}.png", "cap": f"picture {number}"})
    (tmp_path / "7.png").unlink()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    monkeypatch.setattr("mm_core.data.cache.rows._BLOCK", 8)
    return CacheRows(MediaTextDataset([MediaSource(str(tmp_path / "rows.jsonl"))], 1, 8, 8), None, 2, 0)


@pytest.mark.parametrize(
    ("captions", "weight", "found"),
    [(1, 2.0, []), (3, 1.0, ["from epoch 2 on"]), (3, 0.5, ["from epoch 2 on", "weight is not 1"])],
)
def test_what_is_drawn_otherwise_than_without_a_cache_is_noted(tmp_path, captions, weight, found):
    texts = [f"caption {number}" for number in range(captions)]
    listed = [{"path": f"{number}.png", "cap": texts} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    sources = [MediaSource(str(tmp_path / "rows.jsonl"), weight=weight)]
    rows = CacheRows(MediaTextDataset(sources, 1, 8, 8), None, 2, 0)
    notes = rows.drawn_otherwise(repeats=True)
    assert len(notes) == len(found) and all(
        part in note for part, note in zip(found, sorted(notes), strict=True)
    )
    assert rows.drawn_otherwise(repeats=False) == [note for note in notes if "repeats" not in note]


def filled(rows: CacheRows, folder: Path, *shares: tuple[int, int]) -> np.ndarray:
    table = np.zeros((40, 2, 2), KEY)
    for share in shares:
        rows.fill(table, [LATENTS, TEXTS], FileHashes(folder), share)
    return table


def test_ranks_share_the_rows_of_a_table(rows, tmp_path):
    whole = filled(rows, tmp_path / "files", (0, 1))
    assert (filled(rows, tmp_path / "files", (0, 3), (1, 3), (2, 3)) == whole).all()
    part = filled(rows, tmp_path / "files", (1, 3))["high"][:, 0, 1] != 0
    assert np.flatnonzero(part).tolist() == [*range(8, 16), *range(32, 40)]
    assert not whole["high"][7, :, 0].any() and whole["high"][7, :, 1].all()


def test_a_long_start_shows_how_far_it_is(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("mm_core.data.cache.rows._EVERY", -1)
    with pytest.warns(RunWarning) as shown:
        filled(rows, tmp_path / "files", (0, 1))
    assert str(shown[1].message).startswith("16 of 40 rows hashed in 0 s") and len(shown) == 5


def test_a_sample_without_a_caption_has_the_empty_one(rows, tmp_path):
    sources = [Source("a", caption, {}, tmp_path / "1.png") for caption in (None, "", "a")]
    none, empty, other = rows.keys_of(sources, [LATENTS, TEXTS], FileHashes(tmp_path / "files"))
    assert none[1] == empty[1] != other[1] and none[0] == other[0]
    assert none["high"].all()


def fault_of(path: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        PyAVReader().read(path, [0.0])
    return caught.value


def test_what_the_system_refuses_may_pass_and_what_the_decoder_refuses_does_not(tmp_path):
    Image.effect_noise((64, 64), 50).save(tmp_path / "1.png")
    (tmp_path / "loop.mp4").symlink_to(tmp_path / "loop.mp4")
    assert _may_pass(fault_of(tmp_path / "loop.mp4"))
    cut = (tmp_path / "1.png").read_bytes()[:1000]
    for name, content in (("noise.mp4", b"noise" * 99), ("empty.mp4", b""), ("cut.png", cut)):
        (tmp_path / name).write_bytes(content)
        assert not _may_pass(fault_of(tmp_path / name)), name
    for cause, passes in (
        (MemoryError(), True),
        (OSError(5, "I/O error"), True),
        (OSError("cut off"), False),
    ):
        try:
            try:
                raise cause
            except (MemoryError, OSError):
                raise DataError("the image cannot be read") from None
        except DataError as error:
            assert _may_pass(error) == passes
