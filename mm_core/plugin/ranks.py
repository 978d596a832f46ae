"""Compares the plugins of all ranks, which must have the same ones."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from mm_core.errors import PluginError


def check_ranks_agree(
    tables: Sequence[Mapping[str, str]],
    things: str = "plugins",
    absent: str = "not loaded",
    hint: str = "compare `mm plugins list` on the machines of these ranks",
) -> None:
    """Checks that all ranks have the same plugins, or other named things, in the same versions.

    Args:
        tables: `tables[r]` is rank r's `Registry.fingerprint_table()`, or a similar table of versions.
        things: what the names are, for the error.
        absent: text for a name that a rank does not have.
        hint: hint of the error.

    Raises:
        PluginError: names the ranks that differ from most ranks, and the differences.
    """
    keys = [tuple(sorted(table.items())) for table in tables]
    if len(set(keys)) <= 1:
        return
    common = max(Counter(keys).items(), key=lambda item: (item[1], item[0] == keys[0]))[0]
    others = [rank for rank, key in enumerate(keys) if key != common]
    lines = []
    for name in sorted({name for table in tables for name in table}):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, table in enumerate(tables):
            holders[table.get(name, absent)].append(rank)
        if len(holders) > 1:
            lines.append(f"{name}: " + "; ".join(f"{text} on {ranks_text(r)}" for text, r in holders.items()))
    verb = "has" if len(others) == 1 else "have"
    raise PluginError(
        f"{ranks_text(others)} of {len(tables)} {verb} different {things} from the rest: {'. '.join(lines)}",
        accepted=f"the same {things} in the same versions on all ranks",
        hint=hint,
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a message about different plugins: `rank 3`, `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {text}"
