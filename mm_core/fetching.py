"""Fetches what a run reads from the Hugging Face Hub, by `huggingface_hub`, into the user's cache of it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import NoReturn

from mm_core.errors import MMError, RunWarning, first_line, plural
from mm_core.files import replace_text
from mm_core.hub import PREFIX, HubName, decide
from mm_core.hub_files import Use, chosen

_REFUSALS = {401: "refuses the token", 403: "forbids this", 429: "has had too many requests from here"}
_SECONDS = 10.0  # that the hub may take to list a repository
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
_LAUNCH_SECONDS = 900.0  # for which ranks take the commit that one of them has found: a container may restart
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@|\?[^\s'\")]+")


class UnreachableError(MMError):
    """The hub cannot be asked, and the cache does not have the answer."""


@dataclass(frozen=True)
class Listing:
    """The files of a repository at a commit: path in it -> bytes, None where a mirror does not list them."""

    commit: str
    files: Mapping[str, int | None]


@dataclass(frozen=True)
class Wanted:
    """What a run reads of one repository at a revision.

    Attributes:
        name: the repository.
        files: the files to read, with their bytes; None: neither the hub nor the cache has a list.
        absent: those that are not in the cache.
    """

    name: HubName
    files: Mapping[str, int | None] | None
    absent: tuple[str, ...] = ()

    @property
    def absent_bytes(self) -> int | None:
        """Bytes to fetch; None where they are not known."""
        sizes = [self.files[file] for file in self.absent] if self.files is not None else [None]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def to_mapping(self) -> dict[str, object]:
        """What is fetched, as JSON; `bytes` is null where nothing is known of the repository."""
        files, size = [*self.absent], self.absent_bytes
        return {"name": self.name.key, "commit": self.name.commit, "files": files, "bytes": size}

    def render(self) -> str:
        """What is fetched, as a line of a plan."""
        if (size := self.absent_bytes) is None:
            return f"to fetch from the hub: {self.name.key}, of unknown size"
        if not self.absent:
            return f"in the cache of the hub: {self.name.key}"
        shown = f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2g} MB"
        return f"to fetch from the hub: {self.name.key}, {plural(len(self.absent), 'file')}, {shown}"


def local(text: str) -> Path:
    """The path that an option of a command names; what is on the hub is fetched first.

    Raises:
        MMError: it cannot be fetched.
    """
    if not text.startswith(PREFIX):
        return Path(text)
    name = HubName.of(text)
    fetch([Use(name)])
    return name.path


def fetch(uses: Collection[Use], commits: Mapping[str, str] | None = None) -> None:
    """Fetches what is not in the cache yet, and lets this process and its ranks read it at the found commits.

    One process of a host works on a repository at a time; the others find it done.

    Args:
        uses: the names, with what is read of each.
        commits: `org/name@revision` -> the commit to take, such as that of the run that is resumed.

    Raises:
        MMError: a repository, revision, folder or permission is missing, the hub cannot be reached, the disk
            is full, or a file is not the listed one.
    """
    decide(commits or {})
    for group in _grouped(uses):
        with _alone(group[0].name):
            decide({group[0].name.key: _fetched(group)})


def planned(uses: Collection[Use]) -> list[Wanted]:
    """What `fetch` would fetch, by repository. Sizes come from the hub, or from the cache.

    Raises:
        MMError: what `fetch` refuses too.
    """
    rows = []
    for group in _grouped(uses):
        name = group[0].name
        try:
            rows.append(_compared(group, _listing(name)))
        except UnreachableError:
            rows.append(Wanted(name, None))
    return rows


def _grouped(uses: Collection[Use]) -> list[list[Use]]:
    """The uses of each repository and revision."""
    groups: dict[str, list[Use]] = {}
    for use in uses:
        groups.setdefault(use.name.key, []).append(use)
    return [*groups.values()]


@contextmanager
def _alone(name: HubName) -> Iterator[None]:
    """A block that one process of this host runs at a time for a repository. A dead process holds no lock."""
    from filelock import FileLock

    file = name.store.parent / ".locks" / f"{name.store.name}.mm_core.lock"
    lock = FileLock(file)
    with suppress(OSError):  # a cache that cannot be written may be complete
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetched(uses: Sequence[Use]) -> str:
    """Fetches the files of one repository, and returns its commit."""
    name = uses[0].name
    listing = _listing(name, of_launch := _of_launch(name))
    wanted = _compared(uses, listing)
    if wanted.absent:
        _download(wanted, listing.commit)
        if left := _compared(uses, listing).absent:
            _not_listed(name, f"{left[0]} has another size than the hub lists")
    if name.decided is None and of_launch is None:
        runs = any(use.weights for use in uses)  # a plan leaves the last run's files in use
        if runs or name.commit is None:
            _keep(name.store / "refs" / name.revision, listing.commit)
        if "RANK" in os.environ:
            found = {**_of_this_launch(name), name.key: listing.commit}
            _keep(_notes(name) / "launch.json", json.dumps({_launch(): found}))
    return listing.commit


def _notes(name: HubName) -> Path:
    return name.store / ".mm_core"


def _keep(path: Path, text: str) -> None:
    with suppress(OSError):  # a cache that cannot be written
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)


def _launch() -> str:
    """What the ranks of one launch on this host have in common, under any launcher."""
    parent = "-" if "SLURM_STEP_ID" in os.environ else str(os.getppid())  # a shell of its own for each task
    return " ".join([*(os.environ.get(each, "-") for each in _LAUNCH), parent])


def _of_this_launch(name: HubName) -> Mapping[str, str]:
    """The commits of a repository that ranks of this launch have found, by `org/name@revision`."""
    note = _notes(name) / "launch.json"
    with suppress(OSError, ValueError, KeyError):
        if time.time() - note.stat().st_mtime < _LAUNCH_SECONDS:
            return dict(json.loads(note.read_text())[_launch()])
    return {}


def _of_launch(name: HubName) -> str | None:
    """The commit that another rank of this launch has found: one of them asks the hub, and all agree."""
    return _of_this_launch(name).get(name.key) if "RANK" in os.environ else None


def _listing(name: HubName, commit: str | None = None) -> Listing:
    """The files of a repository, from the hub or, where it cannot be reached, from the cache.

    Args:
        name: the repository and its revision.
        commit: the commit, if it is not the name's.

    Raises:
        MMError: the hub has no such repository or revision, or neither can be read.
    """
    from huggingface_hub import constants

    commit = commit or name.decided
    if commit is not None and (kept := _kept(name, commit)) is not None:
        return kept
    try:
        return _asked(name, commit)
    except UnreachableError as fault:
        known = commit or name.commit or ""
        root = name.store / "snapshots" / known
        here = {path.relative_to(root).as_posix(): path.stat().st_size for path in _files(root)}
        if known and here:
            if commit is None and not constants.HF_HUB_OFFLINE:
                what = f"{name}: {fault.what}; {known} in the cache is used"
                warnings.warn(what, RunWarning, stacklevel=2)
            return _kept(name, known) or Listing(known, here)  # another tool may have fetched a part of it
        raise UnreachableError(
            f"it is not in the cache, and {fault.what}",
            where=str(name),
            hint=name.to_fetch,
        ) from None


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _kept(name: HubName, commit: str) -> Listing | None:
    with suppress(OSError, ValueError):
        return Listing(commit, json.loads((_notes(name) / f"{commit}.json").read_text()))
    return None


def _asked(name: HubName, commit: str | None) -> Listing:
    from huggingface_hub import HfApi

    try:
        api, revision = HfApi(library_name="mm_core"), commit or name.revision
        found = api.model_info(name.repo, revision=revision, files_metadata=True, timeout=_SECONDS)
    except Exception as error:  # the classes of the HTTP library below change with the hub's version
        _raise(error, name)
    listing = Listing(str(found.sha), {each.rfilename: each.size for each in found.siblings or ()})
    if None not in listing.files.values():
        _keep(_notes(name) / f"{listing.commit}.json", json.dumps(dict(listing.files)))
    return listing


def _compared(uses: Sequence[Use], listing: Listing) -> Wanted:
    """What a repository's uses read, and which of that is not in the cache.

    Raises:
        MMError: the repository has no such folder, or no weights there.
    """
    name = uses[0].name
    files = sorted({file for use in uses for file in chosen(use, listing.files)})
    root = name.store / "snapshots" / listing.commit
    sizes = {file: _size(root / file) for file in files}
    absent = [file for file, size in sizes.items() if size is None or size != (listing.files[file] or size)]
    return Wanted(name, {file: listing.files[file] for file in files}, tuple(absent))


def _size(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_size
    return None


def _download(wanted: Wanted, commit: str) -> None:
    from huggingface_hub import constants, snapshot_download

    name, files = wanted.name, plural(len(wanted.absent), "file")
    if constants.HF_HUB_OFFLINE:
        raise MMError(
            f"HF_HUB_OFFLINE is set, and {files} of {name.repo} are not in the cache: {wanted.absent[0]}",
            where=str(name),
            hint=f"where there is a network: hf download {name.repo} --revision {commit}",
        )
    place = next(each for each in (name.store, *name.store.parents) if each.exists())
    if (free := shutil.disk_usage(place).free) < (size := wanted.absent_bytes or 0):
        _full(name, f"{files} have {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free")
    try:
        patterns = [escape(file) for file in wanted.absent]
        snapshot_download(name.repo, revision=commit, allow_patterns=patterns, library_name="mm_core")
    except Exception as error:  # as above
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _full(name, plain_line(error))
        if "onsistency check" in str(error):
            _not_listed(name, plain_line(error))
        try:
            _raise(error, name)
        except UnreachableError as fault:
            hint = "start again: what is there already is not fetched twice"
            raise MMError(f"the download stopped: {fault.what}", where=str(name), hint=hint) from None


def _full(name: HubName, why: str) -> NoReturn:
    raise MMError(
        f"the disk of the cache is too small: {why}",
        where=str(name.store.parent),
        hint="free it, or set HF_HOME to a folder on a larger disk",
    )


def _not_listed(name: HubName, why: str) -> NoReturn:
    raise MMError(
        f"a file changed while it was fetched: {why}",
        where=str(name),
        hint=f"start again; if it stays so, delete {name.store}",
    )


def plain_line(error: Exception) -> str:
    """The first line of an error of the HTTP library, without what addresses in it may reveal."""
    return _CREDENTIALS.sub("", first_line(error))


def _raise(error: Exception, name: HubName) -> NoReturn:
    """Raises a library's error about a repository as ours; one of the connection as `UnreachableError`."""
    from huggingface_hub import errors

    what = hint = None
    if isinstance(error, errors.GatedRepoError):
        what = f"{name.repo} is gated"
        hint = "accept its terms on its page, then `hf auth login` or set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        what, hint = f"{name.repo} has no revision {name.revision}", "name a branch, a tag or a commit of it"
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = f"the hub has no model {name.repo}, or it is private"
        hint = "check the name; for a private model `hf auth login` or set HF_TOKEN"
    if what is None:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in _REFUSALS:
            raise UnreachableError(f"the hub {_REFUSALS[status]} (HTTP {status})") from None
        offline = isinstance(error, errors.OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE is set" if offline else plain_line(error)
        raise UnreachableError(f"the hub cannot be reached: {why}") from None
    raise MMError(what, where=str(name), hint=hint) from None
