"""Publishing an export on the Hugging Face Hub: its files and its model card, in one commit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mm_core.errors import MMError, first_line
from mm_core.hub import PREFIX, HubName


def check_push(repo: str) -> None:
    """Checks what can be checked before hours are spent on an export: the name, and that a user is logged in.

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
        HfApi(library_name="mm_core").whoami()
    except Exception as error:  # the classes of the HTTP library below change with the hub's version
        raise MMError(
            f"the hub does not know who pushes: {first_line(error).partition('. ')[0]}",
            where="--push",
            hint="log in with `hf auth login`, or set HF_TOKEN to a token that may write",
        ) from None


def push(files: Sequence[Path], repo: str, summary: str) -> str:
    """Pushes an export in one commit; the repository is made if there is none. Returns the commit's address.

    Args:
        files: the folder of an export, or single files, which are pushed under their names.
        repo: `org/name`.
        summary: the commit's message.

    Raises:
        MMError: the hub refuses it or cannot be reached; the export stays.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="mm_core")
    pairs = [
        (path, path.relative_to(each if each.is_dir() else each.parent).as_posix())
        for each in files
        for path in (sorted(each.rglob("*")) if each.is_dir() else [each])
        if path.is_file()
    ]
    try:
        api.create_repo(repo, exist_ok=True)
        operations = [CommitOperationAdd(name, str(path)) for path, name in pairs]
        return str(api.create_commit(repo, operations, commit_message=summary).commit_url)
    except Exception as error:  # as above
        raise MMError(
            f"the hub did not take the export: {first_line(error)}",
            where=f"--push {repo}",
            hint=f"it is complete in {files[0]}; to push it again: hf upload {repo} {files[0]}",
        ) from None
