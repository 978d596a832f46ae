"""Files that data, caches and stored runs name are plain files: nothing waits for a pipe."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mm_core.data.cache.claims import Claims
from mm_core.data.rows.paths import open_plain
from mm_core.errors import DataError
from mm_core.files import open_append
from mm_core.runtime.launch.rank_logs import RankLog

CACHE = "from mm_core.data.cache.store import Store; Store(Path(sys.argv[1]))"
READERS = {
    "format.txt": CACHE,
    "claim": "from mm_core.data.cache.claims import Claims; Claims(Path(sys.argv[1])).take('claim')",
    "shard": "from mm_core.data.cache.shards import open_shard; open_shard(Path(sys.argv[1]) / 'shard')",
    "record.json": "from mm_core.report.align.records import read_record; read_record(Path(sys.argv[1]))",
    "rows_0.jsonl": "Path(sys.argv[1], 'record.json').write_text('{\"world\": 1}');"
    "from mm_core.report.align.records import read_record; read_record(Path(sys.argv[1]))",
    "states.pt": "from mm_core.weights import load_tensors; load_tensors(Path(sys.argv[1]) / 'states.pt')",
    "facts.json": "from mm_core.checkpoint.files.layout import read_json;"
    "read_json(Path(sys.argv[1]) / 'facts.json')",
    ".metadata": "from mm_core.checkpoint.files.metadata import read_metadata; read_metadata("
    "Path(sys.argv[1]), {})",
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_in_place_of_a_stored_file_is_a_sentence_and_nothing_waits(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    program = (
        "import sys; from pathlib import Path; from mm_core.errors import MMError\n"
        f"try:\n    {READERS[name]}\nexcept MMError as error:\n    print(error)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert ended.stderr == ""
    assert name in ended.stdout or str(tmp_path) in ended.stdout


def test_what_a_run_appends_to_is_a_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a named pipe"):
        open_append(tmp_path / "pipe")
    log = RankLog(tmp_path / "pipe")
    log.write("a line")
    log.close()
    for text in ("one", "two"):
        with open_append(tmp_path / "log") as file:
            file.write(text.encode())
    assert (tmp_path / "log").read_text() == "onetwo"


def test_only_plain_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    os.mkfifo("pipe")
    Path("folder").mkdir()
    Path("link").symlink_to("pipe")
    Path("plain").write_bytes(b"text")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    for name in ("pipe", "folder", "link", "socket", "/dev/zero", "gone"):
        with pytest.raises(DataError, match="the caption cannot be opened"):
            open_plain(Path(name), "caption")
    with open_plain(Path("plain"), "caption") as file:
        assert file.read() == b"text"


@pytest.mark.parametrize(
    "claim", [b"\xff\xfe", "²5 1@{}", "9" * 5000 + " 1@{}", "-5 1@{}", "1" * 30 + " x@{}"]
)
def test_a_claim_with_odd_numbers_is_of_nobody_once_it_is_old(claim: str | bytes, tmp_path: Path) -> None:
    content = claim if isinstance(claim, bytes) else claim.format(socket.gethostname()).encode()
    (tmp_path / "chunk").write_bytes(content)
    assert not Claims(tmp_path).take("chunk")
    os.utime(tmp_path / "chunk", (0, 0))
    assert Claims(tmp_path).take("chunk")


def test_a_row_of_brackets_is_no_record(tmp_path: Path) -> None:
    from mm_core.errors import MMError
    from mm_core.report.align.records import read_record

    (tmp_path / "record.json").write_text('{"world": 1}')
    (tmp_path / "rows_0.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(MMError, match="no record that is complete"):
        read_record(tmp_path)
