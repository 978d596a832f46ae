"""What stands at an output path stays what it is: links are written through, pipes and devices into."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading

import pytest

from mm_core.errors import MMError
from mm_core.files import write_text


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_link_to_nothing_makes_its_target(tmp_path):
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_link_to_itself_is_an_error(tmp_path):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(MMError, match="cannot be written"):
        write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()


def test_a_pipe_is_written_into(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(pipe, "new")
    reader.join(5)
    assert read == ["new"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_full_device_is_an_error_and_stays_a_device(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")  # a link: at worst, the test replaces no device
    with pytest.raises(MMError, match="No space left"):
        write_text(tmp_path / "full", "new")
    assert stat.S_ISCHR((tmp_path / "full").stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "a link"])
@pytest.mark.parametrize("mode", [">", ">>"])
def test_standard_output_that_is_a_file_keeps_what_it_holds(tmp_path, name, mode):
    log, place = tmp_path / "log", name
    log.write_text("kept\n")
    if name == "a link":
        (tmp_path / "link").symlink_to("/dev/stdout")
        place = tmp_path / "link"
    program = f"from mm_core.files import write_text; print(1); write_text({str(place)!r}, '2\\n'); print(3)"
    program = program.replace("write_text('", "write_text(__import__('pathlib').Path('").replace(
        "', '2", "'), '2"
    )
    subprocess.run(["sh", "-c", f'"$1" -c "$2" {mode} "$3"', "sh", sys.executable, program, log], check=True)
    assert log.read_text() == ("kept\n" if mode == ">>" else "") + "1\n2\n3\n"


@pytest.mark.parametrize("kind", ["folder", "socket"])
def test_what_takes_no_text_is_an_error_and_stays(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    place = tmp_path / "place"
    if kind == "folder":
        place.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("place")
    before = stat.S_IFMT(place.stat().st_mode)
    with pytest.raises(MMError, match="cannot be written"):
        write_text(place, "new")
    assert stat.S_IFMT(place.stat().st_mode) == before
    assert [each.name for each in tmp_path.iterdir()] == ["place"]


def test_the_errors_that_pages_name_come_from_the_package():
    from mm_core import DataError

    assert issubclass(DataError, MMError)
