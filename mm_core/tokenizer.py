"""Opening the tokenizer of a Transformers folder: for text encoders and for datasets of text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.errors import CheckpointError, TrustError, first_line
from mm_core.plugin.trust.remote_code import RemoteCode, code_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["open_tokenizer"]

_HINT = "name the tokenizer's own folder (tokenizer: or processor:) where it is not the model's"


def open_tokenizer(folder: str, trust_remote_code: RemoteCode = False) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, whose Python files run only where they are trusted. CheckpointError when
    none can be made of what is there."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise CheckpointError(
            "there is no such folder, so no tokenizer can be made of it",
            where=folder,
            accepted="a folder that Transformers' AutoTokenizer opens",
            hint="models are downloaded first: hf download NAME --local-dir DIR",
        )
    try:
        # Said, for otherwise Transformers asks on the terminal whether to run a folder's code, and waits.
        with code_folder(Path(folder), trust_remote_code) as place:
            tokenizer = AutoTokenizer.from_pretrained(
                place, local_files_only=True, trust_remote_code=bool(trust_remote_code)
            )
        _move(tokenizer, str(place), folder)
    except TrustError:
        raise
    except Exception as fault:  # that of files which do not parse has no kind of its own
        if not trust_remote_code and "trust_remote_code" in str(fault):
            raise CheckpointError(
                "the tokenizer is made by Python files of this folder, which are not run",
                where=folder,
                accepted="a folder with a tokenizer.json",
                hint="read them; trust_remote_code: true of the dataset (text_rows) runs its tokenizer's",
            ) from fault
        raise CheckpointError(
            f"no tokenizer can be made of this folder: {first_line(fault)}",
            where=folder,
            accepted="a folder that Transformers' AutoTokenizer opens",
            hint=_HINT,
        ) from fault
    # Of a folder without them Transformers makes one that knows no word.
    own = getattr(tokenizer, "vocab_files_names", {})  # none: of bytes, or of another library's
    names = {"tokenizer.json", *own.values()}
    if own and not any((Path(folder) / name).is_file() for name in names):
        raise CheckpointError(
            "no tokenizer can be made of this folder: it has none of the files of one",
            where=folder,
            accepted=", ".join(sorted(names)),
            hint=_HINT,
        )
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise CheckpointError("the tokenizer has neither a padding token nor an end token", where=folder)
    return tokenizer


def _move(tokenizer: PreTrainedTokenizerBase, opened: str, folder: str) -> None:
    """Has the tokenizer name its files where they stay. It was opened in a copy of its folder."""
    if opened == folder:
        return
    for table in (vars(tokenizer), tokenizer.init_kwargs):
        for key, value in table.items():
            if isinstance(value, str) and (value == opened or value.startswith(f"{opened}/")):
                table[key] = folder + value.removeprefix(opened)
