"""Tar files of strangers: every image with a caption is read or counted, or the archive is refused."""

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from mm_core.builtin.configs.data import MediaSource
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.rows.media_rows import MediaRow
from mm_core.data.rows.sources import SourceReader
from mm_core.errors import DataError
from support.archives import archive

SAMPLES = {
    "a.jpg": b"JPEG" * 200,
    "a.txt": b"of a",
    "b.jpg": b"",
    "b.txt": b"of b",
    "c.jpg": b"C",
    "c.txt": b"c",
}
LONG = "photos/" * 30


def read(path: Path) -> tuple[list[MediaRow], dict[str, int]]:
    reader = SourceReader(0, MediaSource(str(path)))
    return list(reader.rows()), dict(reader.dropped)


def names(path: Path) -> list[str]:
    rows, dropped = read(path)
    assert dropped == {}
    return [row.path for row in rows]


def block(
    name: bytes, size: bytes = b"0", kind: bytes = b"0", link: bytes = b"", magic: bytes = b""
) -> bytes:
    """A header as v7 has it, or with a `magic` and what follows it, with its checksum."""
    fields = [
        (name, 100),
        (b"644", 8),
        (b"0", 8),
        (b"0", 8),
        (size, 12),
        (b"0", 12),
        (b" " * 8, 8),
        (kind, 1),
    ]
    return summed(b"".join(text.ljust(n, b"\0") for text, n in [*fields, (link, 100), (magic, 255)]))


def summed(header: bytes) -> bytes:
    header = header[:148] + b" " * 8 + header[156:]
    return header[:148] + b"%06o\0 " % sum(header) + header[156:]


def member(header: bytes, content: bytes = b"") -> bytes:
    return header + content + bytes(-len(content) % 512)


def file(name: bytes, content: bytes = b"", **fields: bytes) -> bytes:
    return member(block(name, b"%o" % len(content), **fields), content)


def pax(**records: bytes) -> bytes:
    content = b""
    for key, value in records.items():
        rest = b" %s=%s\n" % (key.replace("_", ".").encode(), value)
        content += b"%d" % (len(rest) + len(str(len(rest) + 2))) + rest
    return content


END = bytes(1024)
AFTER = file(b"z.jpg") + file(b"z.txt", b"of z")


# -- what is read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_of_every_form_are_read(tmp_path, form):
    path = tmp_path / "a.tar"
    stems = ["a", f"{LONG[:80]}/{'b' * 90}"] + ([LONG + "c" * 120, "\u00e9\udcff"] if form else [])
    with tarfile.open(path, "w", format=form, encoding="utf-8", errors="surrogateescape") as made:
        for stem in stems:
            for suffix, content in ((".jpg", b"J" * 700), (".txt", stem[:1].encode())):
                info = tarfile.TarInfo(stem + suffix)
                info.size, info.mtime = len(content), 1.5 if form == tarfile.PAX_FORMAT else 1
                made.addfile(info, io.BytesIO(content))
    rows, dropped = read(path)
    assert [row.path for row in rows] == [f"{stem}.jpg" for stem in stems] and dropped == {}
    assert {path.read_bytes()[row.start : row.start + row.size] for row in rows} == {b"J" * 700}
    assert [row.captions for row in rows] == [(stem[:1],) for stem in stems]


@pytest.mark.parametrize(
    ("content", "paths"),
    [
        (
            file(b"a/", kind=b"\0") + file(b"a/b.jpg", kind=b"\0") + file(b"a/b.txt", b"x", kind=b"7"),
            "a/b.jpg",
        ),
        (block(b"a.jpg", b"\x80" + b"\0" * 11) + file(b"a.txt", b"x"), "a.jpg"),
        (member(block(b"a.jpg", b"\x80" + b"\0" * 10 + b"\3"), b"JPG") + file(b"a.txt", b"x"), "a.jpg"),
        (
            file(b"q", pax(size=b"3"), kind=b"x") + member(block(b"a.jpg"), b"JPG") + file(b"a.txt", b"x"),
            "a.jpg",
        ),
        (
            file(b"q", pax(path=b"g.jpg", comment=b"x"), kind=b"g")
            + file(b"a.jpg")
            + END
            + file(b"g.txt", b"x"),
            "g.jpg",
        ),
        (
            file(b"q", pax(path=b"p.jpg") * 3, kind=b"x") * 3000 + file(b"a.jpg") + file(b"p.txt", b"x"),
            "p.jpg",
        ),
        (file(b"a.jpg", magic=b"ustar\00000" + bytes(80) + b"d") + file(b"d/a.txt", b"x"), "d/a.jpg"),
        (file(b"a.jpg", magic=b"ustar  \0" + bytes(80) + b"1234") + file(b"a.txt", b"x"), "a.jpg"),
        (file(b"a.jpg") + file(b"a.txt", b"x") + END + END + bytes(5120) + AFTER, "a.jpg z.jpg"),
        (file(b"a.jpg") + bytes(512) + file(b"a.txt", b"x"), "a.jpg"),
        (file(b"d/", b"", kind=b"5") + block(b"e.d/", b"7777", b"5") + AFTER, "z.jpg"),
    ],
)
def test_headers_of_every_kind_are_read(tmp_path, content, paths):
    (tmp_path / "a.tar").write_bytes(content + END)
    assert names(tmp_path / "a.tar") == paths.split()


def test_archives_joined_by_cat_are_read_to_their_end(tmp_path):
    first = archive(tmp_path / "0.tar", SAMPLES).read_bytes()
    second = archive(tmp_path / "1.tar", {"sub/" + name: content for name, content in SAMPLES.items()})
    second.write_bytes(first + second.read_bytes())
    assert names(second) == ["a.jpg", "b.jpg", "c.jpg", "sub/a.jpg", "sub/b.jpg", "sub/c.jpg"]


# -- links ------------------------------------------------------------------------------------------


def linked(path: Path, *links: tuple[str, str, bytes]) -> Path:
    made = b"".join(file(name.encode(), kind=kind, link=link.encode()) for name, link, kind in links)
    path.write_bytes(
        file(b"d/a.jpg", b"JPEG") + file(b"d/a.txt", b"of a") + file(b"blob", b"BLOB") + made + END
    )
    return path


def test_links_have_the_content_of_the_member_that_they_lead_to(tmp_path):
    path = linked(
        tmp_path / "a.tar",
        ("b.jpg", "./d/a.jpg", b"1"),
        ("b.txt", "d/a.txt", b"1"),
        ("d/c.jpg", "a.jpg", b"2"),
        ("d/c.txt", "../b.txt", b"2"),
        ("e.png", "blob", b"1"),
        ("e.txt", "d/c.txt", b"2"),
    )
    rows, dropped = read(path)
    assert dropped == {}
    found = {row.path: (path.read_bytes()[row.start : row.start + row.size], *row.captions) for row in rows}
    same = dict.fromkeys(["d/a.jpg", "b.jpg", "d/c.jpg"], (b"JPEG", "of a"))
    assert found == {**same, "e.png": (b"BLOB", "of a")}


def test_links_that_lead_to_no_member_are_counted(tmp_path):
    path = linked(
        tmp_path / "a.tar",
        ("b.jpg", "c.jpg", b"1"),
        ("c.jpg", "b.jpg", b"2"),
        ("none.jpg", "gone.jpg", b"1"),
        ("etc.jpg", "/etc/a.jpg", b"2"),
        ("up.jpg", "../d/a.jpg", b"2"),
        ("shards", "../d", b"2"),
        ("own", "d", b"2"),
        *((f"l{n}.jpg", f"l{n + 1}.jpg", b"2") for n in range(2000)),
    )
    rows, dropped = read(path)
    assert [row.path for row in rows] == ["d/a.jpg"]
    assert dropped == {
        "a link that leads back to itself": 2 + 2000 - 40,
        "a link to a file that the archive does not have": 1 + 40,
        "a link that leads out of the archive": 3,
        "a linked folder, whose files are read in their own place": 1,
    }


def test_many_links_to_nothing_beside_many_members_take_no_minutes(tmp_path):
    """For each link, all members were compared with it: two minutes were not enough."""
    path = linked(
        tmp_path / "a.tar",
        *((f"d/{n}", f"no/{n}", b"2") for n in range(8000)),
        *((f"l{n}.jpg", f"no/{n}", b"2") for n in range(8000)),
    )
    rows, dropped = read(path)
    assert dropped == {"a link to a file that the archive does not have": 8000} and len(rows) == 1


# -- what is counted ----------------------------------------------------------------------------------


def test_members_that_are_not_read_are_counted_if_they_have_a_caption(tmp_path):
    odd = {"d.xyz": b"", "d.txt": b"", "e.a.qqq": b"", "e.json": b"{}", "f.txt": b"", "g": b"", "g.txt": b""}
    beside = {"a.cls": b"", "a.npy": b"", "a.ocr.txt": b"", "more.json": b"[]", ".b.xyz": b"", ".b.txt": b""}
    rows, dropped = read(archive(tmp_path / "a.tar", {**SAMPLES, **beside, **odd}))
    assert [row.path for row in rows] == ["a.jpg", "b.jpg", "c.jpg"]
    assert dropped == {
        ".xyz is not read": 1,
        ".qqq is not read": 1,
        "a file without a suffix is not read": 1,
        "a .txt file without an image or clip beside it": 1,
    }
    inner = {**SAMPLES, "inner.tar": b"", "more/inner.tar.gz": b"", ".hidden.tar": b""}
    assert read(archive(tmp_path / "a.tar", inner))[1] == {
        "an archive inside the archive is not read: unpack it": 2
    }
    device = file(b"b.jpg", kind=b"3") + file(b"c.jpg", kind=b"V") + file(b"A.JPG") + file(b"a.txt", b"x")
    (tmp_path / "a.tar").write_bytes(device + AFTER + END)
    assert read(tmp_path / "a.tar")[1] == {
        "a member of type '3', not a file": 1,
        "a member of type 'V', not a file": 1,
        "no .txt member and no caption in a .json member": 1,
        "a .txt file without an image or clip beside it": 1,
    }


def test_a_long_name_that_is_lost_is_counted(tmp_path):
    (tmp_path / "a.tar").write_bytes(
        file(LONG.encode()[:98] + b".j") + file(LONG.encode()[:100]) + AFTER + END
    )
    assert read(tmp_path / "a.tar")[1] == {"a member whose name is cut off": 2}


def test_an_archive_cut_between_members_is_refused_until_it_is_closed(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(AFTER)
    with pytest.raises(DataError, match=f"cut off behind 'z.txt', at byte {len(AFTER)}") as fault:
        read(path)
    assert (fault.value.hint or "").endswith("head -c 1024 /dev/zero >> a.tar")
    path.write_bytes(AFTER + END)
    assert names(path) == ["z.jpg"]


def test_archives_of_subfolders_are_read_and_what_lies_beside_is_counted(tmp_path):
    for name in ("0.tar", "sub/deep/1.TAR", "sub/._1.tar"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        archive(tmp_path / name, SAMPLES)
    (tmp_path / "sub/._1.tar").write_bytes(b"of another file system")
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(b""))
    for name in ("p.jpg", "p.txt", "q.mp4", "sub/r.xyz", "sub/r.txt", "2.tgz", "list.json"):
        (tmp_path / name).touch()
    (tmp_path / "3.tar").symlink_to("0.tar")
    (tmp_path / "more").symlink_to(tmp_path.parent)
    rows, dropped = read(tmp_path)
    assert [(row.archive, row.path[0]) for row in rows] == [(n, each) for n in range(3) for each in "abc"]
    assert dropped == {
        "an image or clip beside .tar files (name its folder as a source of its own)": 2,
        ".xyz is not read": 1,
        "a compressed archive is not read: unpack it": 2,
        "a linked folder: files outside the source are not read (name it as a source of its own)": 1,
    }


def test_archives_of_subfolders_beside_images_are_counted(tmp_path):
    (tmp_path / "shards").mkdir()
    archive(tmp_path / "shards/0.tar", SAMPLES)
    assert len(names(tmp_path)) == 3  # no image or clip is beside it
    for name in ("x/p.jpg", "x/p.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    rows, dropped = read(tmp_path)
    assert [row.path for row in rows] == ["x/p.jpg"]
    assert dropped == {"a .tar file beside images and clips (name it as a source of its own)": 1}


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.TGZ"])
def test_a_compressed_archive_is_refused_with_the_tool_that_unpacks_it(tmp_path, name):
    made = archive(tmp_path / "made", SAMPLES).read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(made))
    with pytest.raises(DataError, match="it is compressed") as fault:
        read(tmp_path / name)
    assert fault.value.hint == f"unpack it: gunzip --stdout {name} > unpacked.tar"


def test_a_folder_of_compressed_archives_names_them(tmp_path):
    (tmp_path / "a.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    what = r"every row is left out: a compressed archive is not read: unpack it \(1 row"
    with pytest.raises(DataError, match=what):
        read(tmp_path)


def test_half_a_character_in_a_json_member_is_named(tmp_path):
    path = archive(tmp_path / "a.tar", {"a.jpg": b"", "a.json": b'{"cap": ["x", "\\udc80"]}'})
    with pytest.raises(DataError, match=r"the caption contains \\udc80, half of a character") as fault:
        read(path)
    assert fault.value.where == f"{path}, a.jpg"


def test_names_that_are_not_utf8_reach_the_loader(tmp_path):
    """The archive's, its folder's, and its members'."""
    photo = io.BytesIO()
    Image.new("RGB", (8, 8)).save(photo, "PNG")
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    content = (
        file(b"\xff.png", photo.getvalue()) + file(b"\xff.txt", b"of it") + file(b"b.png") + file(b"b.txt")
    )
    (folder / os.fsdecode(b"\xfe.tar")).write_bytes(content + END)
    data = MediaTextDataset([MediaSource(str(folder))], 1, 8, 8)
    assert data[0]["caption"] == "of it" and os.fsencode(data[0]["id"]).endswith(b"caf\xe9/\xfe.tar/\xff.png")
    assert data.source_of(0, None, None).span == (512, len(photo.getvalue()))
    assert len(data.digests()["sources.0.annotations"]) == 64
    with pytest.raises(DataError) as fault:
        data[1]
    assert (fault.value.where or "").endswith("b.png")


def test_a_pipe_in_place_of_an_archive_is_refused(tmp_path):
    path = archive(tmp_path / "a.tar", SAMPLES)
    data = MediaTextDataset([MediaSource(str(path))], 1, 8, 8)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="it is a named pipe, not a plain file"):
        data[0]
    with pytest.raises(DataError, match="this is a named pipe, not an archive"):
        read(path)


# -- what is damaged ----------------------------------------------------------------------------------

GOOD = file(b"g.jpg") + file(b"g.txt", b"of g")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (block(b"a.jpg", b"-512"), "the size of its member is"),
        (block(b"a.jpg", b"\xff" * 12), "the size of its member is"),
        (block(b"a.jpg", b"0_7"), "the size of its member is"),
        (block(b"a.jpg", b"7" * 12), "is cut off"),
        (block(b"a.jpg", b"\x80" + b"\xff" * 11), "is cut off"),
        (block(b"", b"0"), "no name"),
        (b"x" * 512, "its checksum is wrong"),
        (b"x" * 100, "it is cut off"),
        (file(b"q", b"999999 path=a\n", kind=b"x"), "record at byte 0 is broken"),
        (file(b"q", b"9" * 30 + b" path=a\n", kind=b"x"), "record at byte 0 is broken"),
        (file(b"q", b"2 \n", kind=b"x"), "record at byte 0 is broken"),
        (file(b"q", b"-9 path=a\n", kind=b"g"), "record at byte 0 is broken"),
        (file(b"q", pax(size=b"-512"), kind=b"x") + block(b"a.jpg"), "the size of its member is b'-512'"),
        (file(b"q", pax(size=b"9" * 5000), kind=b"x") + block(b"a.jpg"), "the size of its member is"),
        (file(b"q", pax(size=b"9" * 18), kind=b"x") + block(b"a.jpg"), "is cut off"),
        (file(b"q", pax(path=b"a"), kind=b"x"), "no member follows"),
        (block(b"q", b"%o" % 2**25, b"x") + bytes(2**25), "would have 33,554,432 bytes"),
        (block(b"q", b"7777777", b"L"), "cut off"),
        (file(b"q", b"a\0b\0", kind=b"L") + AFTER, "not a long name"),
        (file(b"q", b"a red dog", kind=b"K") + AFTER, "not a long name"),
    ],
)
def test_a_damaged_header_is_named_with_its_place_and_the_member_before(tmp_path, content, why):
    path = tmp_path / "a.tar"
    path.write_bytes(GOOD + content + (END if len(content) >= 512 else b""))
    with pytest.raises(DataError, match=why) as fault:
        read(path)
    assert fault.value.where == str(path) and "last whole member is 'g.txt'" in fault.value.what
    assert int(fault.value.what.partition("at byte ")[2].split()[0]) in range(len(GOOD), len(GOOD + content))


@pytest.mark.parametrize("fields", [{"kind": b"S"}, {"records": b"1"}])
def test_a_member_with_holes_is_refused(tmp_path, fields):
    extended = file(b"q", pax(GNU_sparse_major=b"1"), kind=b"x") if "records" in fields else b""
    (tmp_path / "a.tar").write_bytes(extended + file(b"a.jpg", kind=fields.get("kind", b"0")) + END)
    with pytest.raises(DataError, match=r"'a.jpg' of the archive is stored with holes"):
        read(tmp_path / "a.tar")


# -- 300 mutations ------------------------------------------------------------------------------------


def flipped(tar: bytearray, rng: random.Random, headers: list[int]) -> None:
    """A bit of a header flips."""
    tar[rng.choice(headers) + rng.randrange(512)] ^= 1 << rng.randrange(8)


def rewritten(tar: bytearray, rng: random.Random, headers: list[int]) -> None:
    """A byte of a header that is used changes, and the checksum with it."""
    at = rng.choice(headers)
    tar[at + rng.choice([*range(8), *range(100, 148), 156, *range(157, 165), 257, 263, 345])] = rng.randrange(
        256
    )
    tar[at : at + 512] = summed(bytes(tar[at : at + 512]))


def cut(tar: bytearray, rng: random.Random, headers: list[int]) -> None:
    end = rng.randrange(512, len(tar))
    del tar[rng.choice([end, end // 512 * 512]) :]


def resized(tar: bytearray, rng: random.Random, headers: list[int]) -> None:
    at = rng.choice(headers)
    sizes = [b"-512", b"7" * 12, b"0", b"1000", b"x", b"\xff" * 12, b"\x80" + b"\x7f" * 11, b"-1"]
    tar[at + 124 : at + 136] = rng.choice(sizes).ljust(12, b"\0")
    tar[at : at + 512] = summed(bytes(tar[at : at + 512]))


def made_link(tar: bytearray, rng: random.Random, headers: list[int]) -> None:
    at = rng.choice(headers)
    tar[at + 156 : at + 157] = rng.choice([b"1", b"2"])
    target = rng.choice([b"a.jpg", b"b.jpg", b"c.txt", b"none", b"../a.jpg", b"/a.jpg", b"."])
    tar[at + 157 : at + 257] = target.ljust(100, b"\0")
    tar[at : at + 512] = summed(bytes(tar[at : at + 512]))


def reordered(tar: bytearray, rng: random.Random, headers: list[int]) -> None:
    """Members change places, or blocks without regard to members."""
    places = headers if rng.random() < 0.5 else [*range(0, len(tar), 512)]
    parts = [bytes(tar[a:b]) for a, b in pairwise([*places, len(tar)])]
    rng.shuffle(parts)
    tar[:] = b"".join(parts)


def zeroed(tar: bytearray, rng: random.Random, headers: list[int]) -> None:
    """Zeros come between members, or the blocks of a header are overwritten by them."""
    at = rng.choice(headers)
    tar[at : at + rng.choice([0, 512])] = bytes(rng.choice([512, 1024]))


MUTATIONS: tuple[Callable[[bytearray, random.Random, list[int]], None], ...] = (
    *(flipped, rewritten, cut, resized, made_link, reordered, zeroed),
)


@pytest.mark.parametrize("form", ["ustar", "gnu", "pax"])
def test_no_mutation_of_an_archive_loses_an_image_silently(tmp_path, form):
    long = {} if form == "ustar" else {f"{LONG}{'d' * 60}.jpg": b"D" * 600, f"{LONG}{'d' * 60}.txt": b"of d"}
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=getattr(tarfile, f"{form.upper()}_FORMAT")) as made:
        for name, content in {**SAMPLES, **long}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
        whole = made.offset
    whole = path.read_bytes()[: whole + 1024]
    headers = [at for at in range(0, len(whole), 512) if whole[at + 257 : at + 262] == b"ustar"]
    total = (len(SAMPLES) + len(long)) // 2
    refused = 0
    for seed in range(100):
        rng, tar = random.Random(f"{form} {seed}"), bytearray(whole)
        for mutate in rng.sample(MUTATIONS, 1 + seed % 2):
            mutate(tar, rng, [at for at in headers if at + 512 <= len(tar)])
        path.write_bytes(tar)
        try:
            rows, dropped = read(path)
        except DataError as fault:
            assert fault.where and str(path) in fault.where
            refused += 1
        else:
            assert len(rows) + sum(dropped.values()) >= total, f"seed {seed}: {dropped}"
    assert 30 < refused < 100  # both outcomes are met
