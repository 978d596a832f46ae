"""The files of the feature cache: what is written is found and read again, and damaged files are refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from mm_core.data.cache import claims
from mm_core.data.cache.claims import Claims
from mm_core.data.cache.samples import stacked
from mm_core.data.cache.shards import FAULTY, KEY, Keys, mapped, open_shard
from mm_core.data.cache.store import Store
from mm_core.data.datasets.video_text import made_of
from mm_core.errors import CacheError, ContractError
from mm_core.processes import started

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)


def keys_of(*numbers: int) -> Keys:
    keys = np.zeros(len(numbers), KEY)
    keys["high"] = [number + 1 for number in numbers]
    keys["low"] = [7 * number + 1 for number in numbers]
    return keys


def features(seed: int, *, length: int = 3) -> dict[str, torch.Tensor]:
    drawn = torch.randn(length, 4, generator=torch.Generator().manual_seed(seed))
    return {"states": drawn.bfloat16(), "mask": drawn[:, 0] > 0, "size": torch.tensor([seed, length])}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache", create=True)


def shard_of(store: Store, *numbers: int) -> Path:
    store.add(keys_of(*numbers), [features(number, length=1 + number % 3) for number in numbers])
    store.refresh()
    return store.shards[-1].path


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        for name, tensor in wanted.items()
    )


def test_an_entry_takes_no_others_along_to_another_process(store):
    shard_of(store, *range(9))
    for tensor in store.read(4).values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_entries_of_several_shards_are_read_as_they_were_written(store):
    for first in (0, 10, 20):
        shard_of(store, *range(first, first + 10))
    for number in range(30):
        (place,) = store.find(keys_of(number))
        assert same(store.read(int(place)), features(number, length=1 + number % 3))
    assert store.find(keys_of(30, 99)).tolist() == [-1, -1]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b", "long name"]),
            st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_entries_of_any_shapes_and_dtypes_share_a_shard(tmp_path_factory, forms):
    store = Store(tmp_path_factory.mktemp("any") / "cache", create=True)
    entries = [
        {name: torch.full(shape, n + 1).to(dtype) for name, (dtype, shape) in form.items()}
        for n, form in enumerate(forms)
    ]
    store.add(keys_of(*range(len(entries))), entries)
    store.refresh()
    places = store.find(keys_of(*range(len(entries)))).tolist()
    assert all(same(store.read(place), entry) for place, entry in zip(places, entries, strict=True))


def test_safetensors_reads_a_shard(store):
    with safe_open(shard_of(store, 0, 3, 6), "pt") as file:
        assert {*file.keys()} == {"index", "0/states", "0/mask", "0/size"}
        assert torch.equal(file.get_tensor("0/states")[1], features(3, length=1)["states"])


def test_a_shard_is_synced_before_it_has_its_name_and_others_may_read_it(store, monkeypatch):
    synced, beside = {}, []
    kept = os.fsync

    def fsync(handle):
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size
        beside.append(sorted(path.name for path in (store.folder / "shards").iterdir()))
        kept(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    path, umask = shard_of(store, 1, 2), os.umask(0)
    os.umask(umask)
    found = path.stat()
    assert synced[found.st_ino] == found.st_size
    assert stat.S_IMODE(found.st_mode) == 0o666 & ~umask
    (staged,), (named,) = beside  # of the file and then of its folder; `tidy` knows what a kill would leave
    assert staged.startswith(f".{path.stem}.tmp-")
    assert named == path.name


def test_a_process_finds_what_another_has_added_after_its_refresh(store):
    other = Store(store.folder)
    assert not other.refresh()
    shard_of(store, 1)
    assert other.find(keys_of(1)).tolist() == [-1]
    assert other.refresh() and other.find(keys_of(1)).tolist() == [0]


def test_keys_that_share_64_bits_are_told_apart(store):
    twins = keys_of(1, 1, 1)
    twins["low"] = [5, 6, 7]
    store.add(twins, [features(number) for number in range(3)])
    store.refresh()
    assert [int(store.read(int(place))["size"][0]) for place in store.find(twins)] == [0, 1, 2]
    twins["low"] = 8
    assert store.find(twins).tolist() == [-1] * 3


def test_what_another_process_moves_is_found_again_and_what_it_removes_is_not_there(store):
    shard_of(store, *range(8))
    reader = Store(store.folder)
    store.keep(np.isin(store.keys["high"], keys_of(1, 2)["high"]))
    kept, gone = reader.get(keys_of(2, 3))
    assert gone is None and same(kept, features(2, length=3))
    (held,) = Store(store.folder).get(keys_of(1))
    store.keep(np.zeros(len(store), bool))
    assert same(held, features(1, length=2)) and reader.get(keys_of(1)) != [None]  # mapped already
    assert Store(store.folder).get(keys_of(1)) == [None]


def test_real_features_win_over_a_fault_of_the_same_sample(store):
    bad = keys_of(0, 1, 2)
    bad["encoder"] = FAULTY
    reasons = [{"fault": torch.zeros(3, dtype=torch.uint8)}] * 3
    store.add(bad[:2], reasons[:2])
    shard_of(store, 1, 2)
    store.add(bad[2:], reasons[2:])
    store.refresh()
    found = [[*entry] for entry in store.get(keys_of(0, 1, 2))]
    assert found[0] == ["fault"] and "states" in found[1] and "states" in found[2]


def test_what_is_not_needed_is_removed_and_the_rest_is_kept(store):
    first, second = shard_of(store, *range(8)), shard_of(store, 8, 9)
    needed = np.isin(store.keys["high"], keys_of(1, 2, 3)["high"])
    before = first.stat().st_size + second.stat().st_size
    freed = store.keep(needed)
    assert len(store) == 3 and not first.exists() and not second.exists()
    assert freed == before - store.shards[0].path.stat().st_size
    assert same(store.read(int(store.find(keys_of(2))[0])), features(2, length=3))


# -- bad input ------------------------------------------------------------------------------------


def test_a_folder_without_a_cache_or_with_another_format_is_refused(tmp_path, store):
    with pytest.raises(CacheError, match="there is no feature cache"):
        Store(tmp_path / "none")
    (store.folder / "format.txt").write_text("mm_core feature cache, format 2\n")
    with pytest.raises(CacheError, match="another format: 'mm_core feature cache, format 2'"):
        Store(store.folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be opened"):
        Store(tmp_path / "file")


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1, -100])
def test_a_cut_off_shard_is_named(store, size):
    path = shard_of(store, *range(6))
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    with pytest.raises(CacheError) as caught:
        Store(store.folder)
    assert caught.value.where == str(path) and "delete this file" in str(caught.value)


def header(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(path: Path, text: bytes) -> None:
    data = path.read_bytes()
    rest = data[8 + int.from_bytes(data[:8], "little") :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + rest)


@pytest.mark.parametrize(
    "change",
    [
        {"index": {"dtype": "I64", "shape": [1 << 40, 5], "data_offsets": [0, 5 << 43]}},
        {"index": {"dtype": "U8", "shape": [240], "data_offsets": [0, 240]}},
        {"index": None},
        {"0/states": {"dtype": "F32", "shape": [-2, 2], "data_offsets": [0, 16]}},
        {"0/states": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"0/states": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"0/states": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
        {"0/states": {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]}},
        {"0/states": 3},
        {"states": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}},
        {"7/x": {"dtype": "U8", "shape": [99], "data_offsets": [0, 99]}},
        {"__metadata__": {"format": "pt"}},
        {"__metadata__": 5},
    ],
)
def test_a_hostile_header_is_refused(store, change):
    path = shard_of(store, 0, 3, 6)
    found = header(path) | change
    with_header(
        path, json.dumps({name: value for name, value in found.items() if value is not None}).encode()
    )
    with pytest.raises(CacheError):
        open_shard(path)


@pytest.mark.parametrize("group", ["²", 5000 * "9", "-1", "+1", " 1", "1_0", ""])
def test_a_group_with_an_odd_number_is_refused(tmp_path, group):
    index = torch.zeros(2, KEY.itemsize // 8 + 1, dtype=torch.int64)
    stored = {"index": index, f"{group}/states": torch.zeros(2, 3)}
    (tmp_path / "odd.safetensors").write_bytes(save(stored, {"format": "mm_core feature cache 2"}))
    with pytest.raises(CacheError, match="has no place in it"):
        open_shard(tmp_path / "odd.safetensors")


@pytest.mark.parametrize("text", [b"[" * 100_000, b"3", b"null", b"\xff\xfe", b"{", b""])
def test_so_is_one_that_is_no_header(store, text):
    path = shard_of(store, 0)
    with_header(path, text)
    with pytest.raises(CacheError):
        open_shard(path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_flipped_byte_of_a_header_does_more_than_be_refused(tmp_path_factory, data):
    store = Store(tmp_path_factory.mktemp("flipped") / "cache", create=True)
    path = shard_of(store, 0, 1, 2)
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        shard = open_shard(path)
        for place in range(len(shard.keys)):
            shard.entry(mapped(shard.path), place)
    except CacheError:
        pass


@contextmanager
def files_limited(size: int) -> Iterator[None]:
    """No file can be longer: as on a full disk, a write fails in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_room_nothing_is_lost_and_nothing_is_left(store):
    shard_of(store, 0, 1)
    with (
        files_limited(400),
        pytest.raises(CacheError, match=r"the cache cannot be written: .*File too large"),
    ):
        store.add(keys_of(*range(2, 50)), [features(number) for number in range(2, 50)])
    assert len([*(store.folder / "shards").iterdir()]) == 1
    assert len(Store(store.folder)) == 2


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """As a user who may read a folder but not write it; root could."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for parent in folder.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o755)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_read_only_cache_is_read():
    folder = Path(tempfile.mkdtemp())  # others cannot enter the folders of pytest
    folder.chmod(0o755)
    store = Store(folder / "cache", create=True)
    shard_of(store, 0, 1)
    with as_nobody(store.folder):
        found = Store(store.folder)
        assert found.find(keys_of(1)).tolist() == [1] or found.find(keys_of(1)).tolist() == [0]
        with pytest.raises(CacheError, match="cannot be written: Permission denied"):
            found.add(keys_of(2), [features(2)])
        with pytest.raises(CacheError, match="cannot be written"):
            Claims(store.folder / "claims").take("a")
        for needed in ([False, False], [True, False]):
            with pytest.raises(CacheError, match="cannot be written: Permission denied"):
                found.keep(np.array(needed))
    (store.folder / "claims").rmdir()
    with as_nobody(store.folder):
        assert len(Store(store.folder, create=True)) == 2
    shutil.rmtree(folder)


def test_a_cache_without_shards_has_nothing_to_remove(store):
    assert store.keep(np.zeros(0, bool)) == 0


def test_a_copy_without_the_empty_folders_is_written_again(store):
    shard_of(store, 0)
    for name in ("facts", "claims"):
        (store.folder / name).rmdir()
    again = Store(store.folder, create=True)
    assert len(again) == 1 and (again.folder / "facts").is_dir()
    assert Claims(again.folder / "claims").take("a")


def test_features_of_a_strange_dtype_are_refused(store):
    with pytest.raises(CacheError, match="complex128"):
        store.add(keys_of(0), [{"a": torch.zeros(2, dtype=torch.complex128)}])


# -- claims -----------------------------------------------------------------------------------------


def test_a_claim_is_one_process_alone_until_it_is_released(tmp_path):
    one, other = Claims(tmp_path), Claims(tmp_path)
    assert one.take("a") and not other.take("a") and other.take("b")
    one.release("a")
    assert other.take("a")
    other.release_all()
    assert [*tmp_path.iterdir()] == []


def test_the_claim_of_a_dead_process_is_taken_over(tmp_path):
    child = subprocess.Popen(["true"])
    child.wait()
    host = socket.gethostname()
    own = f"{os.getpid()} {started(os.getpid())}"
    (tmp_path / "a").write_text(f"{child.pid} 5@{host}")
    (tmp_path / "b").write_text("1 5@another-host")
    (tmp_path / "c").write_text("1 5@another-host")
    (tmp_path / "d").write_text(f"{os.getpid()} 5@{host}")  # its id is another's since a restart
    (tmp_path / "e").write_text(f"{own}@{host}")
    (tmp_path / "f").write_text(f"{own}@{host}")
    for name in "cf":  # silent for too long
        os.utime(tmp_path / name, (1, 1))
    mine = Claims(tmp_path)
    assert [mine.take(name) for name in "abcdef"] == [True, False, True, True, False, True]


def test_only_the_claims_of_the_dead_are_swept(tmp_path):
    owner, mine = Claims(tmp_path), Claims(tmp_path)
    owner.take("held")
    (tmp_path / "being-written").touch()
    (tmp_path / "elsewhere").write_text("1 5@another-host")
    (tmp_path / "dead").write_text(f"{os.getpid()} 5@{socket.gethostname()}")
    mine.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {"held", "being-written", "elsewhere"}
    Claims(tmp_path / "none").sweep()


@pytest.mark.parametrize("dead", [False, True])
def test_of_two_that_claim_at_once_one_has_the_chunk(tmp_path, monkeypatch, dead):
    """The other takes it between the first one's look and its own claim."""
    one, other = Claims(tmp_path), Claims(tmp_path)
    if dead:
        (tmp_path / "a").write_text("1 5@another-host")
        os.utime(tmp_path / "a", (1, 1))
    token, taken = claims.secrets.token_hex, []

    def meanwhile(size: int) -> str:
        monkeypatch.undo()
        taken.append(other.take("a"))
        return token(size)

    read = claims.open_plain

    def looked(path: Path) -> IO[bytes]:
        if dead:
            return read(path)
        monkeypatch.undo()
        try:
            return read(path)
        finally:
            taken.append(other.take("a"))

    monkeypatch.setattr(claims.secrets, "token_hex", meanwhile)
    monkeypatch.setattr(claims, "open_plain", looked)
    assert not one.take("a") and taken == [True]
    one.release_all()
    assert not Claims(tmp_path).take("a"), "it is the other's still"
    other.release_all()
    assert [*tmp_path.iterdir()] == []


# -- what goes with media ---------------------------------------------------------------------------


def test_clips_of_two_sizes_are_not_padded_into_one_batch():
    rows = [{"latents": {"moments": torch.ones(2, 1, size, 4)}} for size in (4, 6)]
    with pytest.raises(
        ContractError, match=r"latents.moments of the sizes \[2, 1, 4, 4\] and \[2, 1, 6, 4\]"
    ):
        stacked(rows)
    texts = [{"text": {"states": torch.ones(length, 3)}} for length in (2, 5)]
    assert stacked(texts)["text.states"].shape == (2, 5, 3)


class Listed:
    """A transform whose settings are of kinds that no key knows."""

    def __init__(self, values):
        self.values, self.table = values, torch.tensor([1.0, 2.0])


def test_settings_of_any_kind_are_in_the_key():
    def made(values):
        return made_of((1, 8, 8), None, Listed(values), None)

    assert made([0.5, 0.4]) == made([0.5, 0.4]) != made([0.5, 0.3])
    other = Listed([0.5, 0.4])
    other.table = torch.tensor([1.0, 3.0])
    assert made_of((1, 8, 8), None, other, None) != made([0.5, 0.4])
