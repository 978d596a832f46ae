"""Code that training records as trusted: it then runs without --allow-code in commands on the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mm_core.config.components import walk_components
from mm_core.config.sections import RunConfig
from mm_core.config.stored import command_piece, setting_piece
from mm_core.errors import MMError, TrustError
from mm_core.plugin.local import imported_code
from mm_core.plugin.trust.known import ALLOW, KnownCode, Piece
from mm_core.plugin.trust.remote_code import code_pieces


def check_commands(config: RunConfig) -> None:
    """Refuses the programs in a stored run's callbacks, unless this user has trained with them.

    Raises:
        TrustError: lists the unknown programs.
    """
    if config.unknown_commands:
        raise TrustError(
            "the stored run's callbacks would run these programs as your user, although no training of yours "
            f"has used them: {', '.join(config.unknown_commands)}",
            where="callbacks",
            accepted="callbacks=[], which runs none of them",
            hint=ALLOW,
        )


def remember(config: RunConfig) -> str | None:
    """Records the code of a training run as known, on the first rank.

    Returns a note if that fails: the run continues anyway.
    """
    try:
        fault = KnownCode.of_user().add([*_pieces(config)])
    except MMError as error:
        fault = error.what
    return (
        fault
        and f"this run's code is not recorded as known: {fault}; commands on the run will need --allow-code"
    )


def remember_imports(config: RunConfig) -> None:
    """Records code that the run's plugins have imported since the start: in a step, metric or validation.

    Errors are ignored: `remember` has reported whether the list can be written.
    """
    with suppress(MMError, OSError):
        KnownCode.of_user().add([*_imports(config)])


def _imports(config: RunConfig) -> Iterator[Piece]:
    return imported_code({plugin.module for plugin in config.registry.plugins})


def _pieces(config: RunConfig) -> Iterator[Piece]:
    yield from _imports(config)
    for _, component in walk_components(config):
        if component.options.get("trust_remote_code"):
            folders = (Path(v) for v in component.options.values() if isinstance(v, str | Path))
            for folder in filter(_is_model, folders):
                yield from code_pieces(folder)
        if component.type == "core/command":
            yield command_piece([str(word) for word in component.options["run"]])
    for path, text in config.literals.items():
        yield setting_piece(path, text)


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "tokenizer_config.json"))
