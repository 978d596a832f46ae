"""The names of batches' inputs: the same in every batch and on every rank."""

from __future__ import annotations

from collections.abc import Iterable

from mm_core.errors import ContractError
from mm_core.runtime.ranks import Ranks

_ACCEPTED = "the same names in every batch: a blank image, say, where a row has none"


class InputNames:
    """Batches with other inputs run other modules of a model, and ranks that run other modules wait for one
    another for ever. where: the data's place in the config."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._seen: frozenset[str] | None = None
        self._agreed = False

    def check(self, names: Iterable[str]) -> None:
        """ContractError for a batch with other inputs than those before it on this rank."""
        found = frozenset(names)
        if self._seen is None:
            self._seen = found
        elif found != self._seen:
            raise ContractError(
                f"a batch has other inputs than those before it: {', '.join(sorted(found ^ self._seen))} "
                "only in some",
                where=self._where,
                accepted=_ACCEPTED,
            )

    def agree(self, names: Iterable[str]) -> None:
        """Before the first forward the ranks compare theirs: ContractError, on all of them, where they
        differ. Called by all ranks, at the same place of their work."""
        self.check(names)
        if self._agreed:
            return
        self._agreed = True
        everyone = Ranks.current().gather(sorted(self._seen or ()))
        other = next((rank for rank, own in enumerate(everyone) if own != everyone[0]), None)
        if other is not None:
            only = ", ".join(sorted(set(everyone[0]) ^ set(everyone[other])))
            raise ContractError(
                f"the batches of rank 0 and rank {other} have other inputs: {only} only in one",
                where=self._where,
                accepted=_ACCEPTED,
            )
