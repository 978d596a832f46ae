"""Publishing an export on the Hugging Face Hub: its files and its model card, in one commit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mm_core.errors import MMError
from mm_core.fetching import plain_line
from mm_core.hub import PREFIX, HubName

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def check_push(repo: str) -> None:
    """Checks the name and that the user may write there, before hours are spent on an export.

    Args:
        repo: `org/name`.

    Raises:
        MMError: it is no such name, or the hub refuses the user.
    """
    from huggingface_hub import HfApi

    name = HubName.of(f"{PREFIX}{repo}")
    if name != HubName(repo):
        raise MMError(f"{repo!r} is no repository", where="--push", accepted="org/name")
    try:
        user = HfApi(library_name="mm_core").whoami()
    except Exception as error:  # the classes of the HTTP library below change with the hub's version
        raise MMError(
            f"the hub does not know who pushes: {plain_line(error).partition('. ')[0]}",
            where="--push",
            hint=_LOG_IN,
        ) from None
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise MMError("this user's token may only read", where="--push", hint=_LOG_IN)
    owners = [str(each.get("name")) for each in (user, *user.get("orgs", ()))]
    if repo.partition("/")[0] not in owners:
        what = f"{owners[0]} is no member of {repo.partition('/')[0]}"
        raise MMError(what, where="--push", accepted=", ".join(f"{each}/NAME" for each in owners))


def push(files: Sequence[Path], repo: str, summary: str) -> str:
    """Pushes an export in one commit; the repository is made if there is none. Returns the commit's address.

    Args:
        files: the folder of an export, or single files, which are pushed under their names; a card, `.md`, as
            README.md.
        repo: `org/name`.
        summary: the commit's message.

    Raises:
        MMError: the hub refuses it or cannot be reached; the export stays.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="mm_core")
    pairs = [
        (path, path.relative_to(each).as_posix() if each.is_dir() else _name(each))
        for each in files
        for path in (sorted(each.rglob("*")) if each.is_dir() else [each])
        if path.is_file()
    ]
    again = [f"hf upload {repo} {each}{'' if each.is_dir() else f' {_name(each)}'}" for each in files]
    try:
        api.create_repo(repo, exist_ok=True)
        operations = [CommitOperationAdd(name, str(path)) for path, name in pairs]
        return str(api.create_commit(repo, operations, commit_message=summary).commit_url)
    except Exception as error:  # as above
        raise MMError(
            f"the hub did not take the export: {plain_line(error)}",
            where=f"--push {repo}",
            hint=f"it is complete; to push it again: {'; '.join(again)}",
        ) from None


def _name(file: Path) -> str:
    return "README.md" if file.suffix == ".md" else file.name
