"""The names on the hub in a config, `hub:org/name`, read as the paths of their folders in the cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mm_core.errors import ConfigError, MMError
from mm_core.files import read_plain
from mm_core.hub import PREFIX, HubName, hint_for
from mm_core.hub_files import Use
from mm_core.schema.nodes import Node

_SMALL = ("tokenizer", "processor")
"""Ends of the keys of folders of which no weights are read."""
_KEYS = ("from_pretrained", "pipeline", *_SMALL)
"""Ends of the keys of folders that could be on the hub."""


def located(root: Node, faults: list[MMError]) -> tuple[Node, Mapping[str, Use]]:
    """A config's tree with paths in place of names on the hub.

    Args:
        root: the tree of the config, without interpolations.
        faults: receives an error for each text that begins like a name and is none.

    Returns:
        The tree, and what is read of each name, by key.
    """
    uses: dict[str, Use] = {}

    def walk(node: Node, above: Node) -> Node:
        if not isinstance(node.value, str) or not node.value.startswith(PREFIX):
            return node.mapped(lambda child: walk(child, node))
        try:
            name = HubName.of(node.value)
        except ConfigError as fault:
            faults.append(ConfigError(fault.what, where=node.place(), accepted=fault.accepted))
            return node
        weights, code = above.at("weights"), above.at("trust_remote_code")
        small = node.path.endswith(_SMALL) or (weights is not None and weights.value == "random")
        uses[node.path] = Use(name, not small, code is not None and code.value is not False)
        return node.holding(str(name.path))

    return walk(root, root), uses


def bare_names(root: Node) -> list[str]:
    """A sentence for each absent folder in a config's tree that has the form of a name on the hub."""
    found = {
        leaf.value: f"{leaf.place()}: there is no folder {leaf.value}; {hint}"
        for leaf in root.leaves()
        if leaf.path.endswith(_KEYS) and isinstance(leaf.value, str) and (hint := hint_for(leaf.value))
    }
    return [*found.values()]


def commits_of(folder: Path) -> dict[str, str]:
    """The commits that a run with a checkpoint has read: `org/name@revision` -> commit; {} of another."""
    if any(True for _ in (folder / "checkpoints").glob("step_*")):
        with suppress(OSError, ValueError, AttributeError):
            found = json.loads(read_plain(folder / "manifest.json")).get("hub", {})
            return {str(key): str(commit) for key, commit in found.items()}
    return {}
