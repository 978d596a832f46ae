"""Opening the tokenizer of a Transformers folder, for text encoders and text datasets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.errors import CheckpointError, TrustError, first_line
from mm_core.hub import no_folder
from mm_core.plugin.trust.remote_code import RemoteCode, code_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["open_tokenizer"]

_HINT = "if the tokenizer is not in the model's folder, set its own folder (tokenizer: or processor:)"


def open_tokenizer(folder: str, trust_remote_code: RemoteCode = False) -> PreTrainedTokenizerBase:
    """Opens the tokenizer in a Transformers folder; Python files in it run only if they are trusted.

    Args:
        folder: the folder with the tokenizer's files.
        trust_remote_code: whether the folder's Python files may run.

    Raises:
        CheckpointError: no tokenizer can be built from the folder.
        TrustError: the folder's Python files are not the ones that were trusted.
    """
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        accepted = "a folder that Transformers' AutoTokenizer can open"
        raise no_folder(Path(folder), accepted, "download the model first: hf download NAME --local-dir DIR")
    try:
        # Set explicitly: otherwise Transformers asks on the terminal whether to run the code, and blocks.
        with code_folder(Path(folder), trust_remote_code) as place:
            tokenizer = AutoTokenizer.from_pretrained(
                place, local_files_only=True, trust_remote_code=bool(trust_remote_code)
            )
        _move(tokenizer, str(place), folder)
    except TrustError:
        raise
    except Exception as fault:  # the error for files that cannot be parsed has no common class
        if not trust_remote_code and "trust_remote_code" in str(fault):
            raise CheckpointError(
                "the tokenizer needs Python files in this folder, and they may not run",
                where=folder,
                accepted="a folder with a tokenizer.json",
                hint="read them; if you trust them, set trust_remote_code: true on the dataset (text_rows)",
            ) from fault
        raise CheckpointError(
            f"no tokenizer can be opened from this folder: {first_line(fault)}",
            where=folder,
            accepted="a folder that Transformers' AutoTokenizer can open",
            hint=_HINT,
        ) from fault
    # From a folder without these files Transformers builds a tokenizer with an empty vocabulary.
    own = getattr(tokenizer, "vocab_files_names", {})  # empty: a byte tokenizer, or one of another library
    names = {"tokenizer.json", *own.values()}
    if own and not any((Path(folder) / name).is_file() for name in names):
        raise CheckpointError(
            "no tokenizer can be opened from this folder: it contains no tokenizer files",
            where=folder,
            accepted=", ".join(sorted(names)),
            hint=_HINT,
        )
    _set_padding(tokenizer, folder)
    return tokenizer


def _set_padding(tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise CheckpointError(
            "the tokenizer has neither a padding token nor an end token",
            where=folder,
            accepted="a tokenizer with pad_token or eos_token",
            hint="add pad_token to its tokenizer_config.json",
        )


def _move(tokenizer: PreTrainedTokenizerBase, opened: str, folder: str) -> None:
    """Replaces paths in the tokenizer, which was opened from a copy of its folder, by the original ones."""
    if opened == folder:
        return
    for table in (vars(tokenizer), tokenizer.init_kwargs):
        for key, value in table.items():
            if isinstance(value, str) and (value == opened or value.startswith(f"{opened}/")):
                table[key] = folder + value.removeprefix(opened)
