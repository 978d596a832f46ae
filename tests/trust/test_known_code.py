"""The list of code that a user has trained with: who may write it, and what happens if nobody can."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from mm_core.errors import TrustError
from mm_core.plugin.trust.known import MAX_SOURCE, KnownCode, Piece, check_known, digest_of, read_source

PIECE = Piece("/code/mine.py", digest_of(b"x = 1\n"))


def test_entries_are_of_their_owner_alone(home):
    known = KnownCode.of_user()
    assert known.folder == home
    assert not known.holds(PIECE.digest)
    assert known.fault() is None  # there is none yet
    before = os.umask(0)
    try:
        assert known.add([PIECE]) is None
    finally:
        os.umask(before)
    assert known.holds(PIECE.digest)
    (entry,) = home.iterdir()
    assert entry.name == PIECE.digest
    assert entry.read_text() == "/code/mine.py\n"
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_list_that_others_can_write_is_not_used(home, mode):
    known = KnownCode.of_user()
    known.add([PIECE])
    home.chmod(mode)
    assert not known.holds(PIECE.digest)
    with pytest.raises(TrustError) as caught:
        check_known([PIECE], "config.yaml")
    assert caught.value.accepted == (
        "no code without asking: the record of code you trained with is not used"
        f" because {home} can be written by others"
    )
    assert known.add([Piece("b", digest_of(b"b"))]) == f"{home} can be written by others"


def test_an_entry_that_others_can_write_does_not_count_until_it_is_written_anew(home):
    known = KnownCode.of_user()
    known.add([PIECE])
    (home / PIECE.digest).chmod(0o666)
    assert not known.holds(PIECE.digest)
    known.add([PIECE])
    assert known.holds(PIECE.digest)
    (home / PIECE.digest).unlink()
    (home / PIECE.digest).symlink_to(sys.executable)
    assert not known.holds(PIECE.digest)


def test_a_list_of_another_user_is_not_used(home, monkeypatch):
    known = KnownCode.of_user()
    known.add([PIECE])
    monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 1)
    assert not known.holds(PIECE.digest)
    assert known.fault() == f"{home} belongs to another user"


def test_a_link_in_the_place_of_the_list_is_not_followed(home, tmp_path):
    KnownCode(tmp_path / "theirs").add([PIECE])
    home.parent.mkdir(parents=True)
    home.symlink_to(tmp_path / "theirs")
    assert KnownCode.of_user().fault() == f"{home} is not a folder"
    assert not KnownCode.of_user().holds(PIECE.digest)


def test_a_home_that_cannot_be_written_is_reported_and_stops_nothing(home):
    home.parent.parent.mkdir(parents=True)
    home.parent.write_text("a file in the way")
    assert KnownCode.of_user().fault() is None
    said = KnownCode.of_user().add([PIECE])
    assert said is not None
    assert said.startswith(f"{home} cannot be written: ")


def test_a_user_without_a_home_has_no_list(monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda user: {}[user])  # the user id has no account
    known = KnownCode.of_user()
    assert known.folder is None
    assert known.add([PIECE]) == "this user has no home folder"
    with pytest.raises(TrustError, match=r"you have not trained with it: /code/mine\.py"):
        check_known([PIECE], "config.yaml")


@pytest.mark.parametrize("value", ["", "relative/state"])
def test_a_state_folder_that_depends_on_where_one_stands_is_not_taken(monkeypatch, tmp_path, value):
    monkeypatch.setenv("XDG_STATE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert KnownCode.of_user().folder == tmp_path / ".local/state/mm_core/trusted_code"
    monkeypatch.setenv("HOME", "relative")
    assert KnownCode.of_user().folder is None


def test_endless_and_foreign_files_are_not_read_as_code(tmp_path):
    with pytest.raises(OSError, match="not a regular file"):
        read_source(type(tmp_path)("/dev/zero"))
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        read_source(pipe)
    large = tmp_path / "large.py"
    with large.open("wb") as file:
        file.truncate(MAX_SOURCE + 1)
    with pytest.raises(OSError, match="larger than 8 MiB"):
        read_source(large)
    with pytest.raises(OSError, match="not a regular file"):
        read_source(tmp_path)


@pytest.mark.slow
def test_many_writers_at_once_lose_nothing(home):
    code = (
        "from mm_core.plugin.trust.known import *\n"
        "for i in range(200):\n"
        "    assert KnownCode.of_user().add([Piece('p', digest_of(str(i).encode()))]) is None"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    known = KnownCode.of_user()
    assert all(known.holds(digest_of(str(i).encode())) for i in range(200))
    assert len([*home.iterdir()]) == 200
