"""Config values that only earlier versions accept: read in the config of a stored run, else refused."""

from __future__ import annotations

from mm_core.config.stored import Sources
from mm_core.errors import ConfigError, MMError
from mm_core.schema.nodes import FAILED, Node

FORMER_WRITERS = ("process", "thread")
"""Values of `checkpoint.async` that were accepted beside true and false."""
_REMOVED = "the process mode was removed, and a thread writes every asynchronous save"


def without_former_values(root: Node, sources: Sources, faults: list[MMError]) -> Node:
    """A config's tree with former values of `checkpoint.async` replaced by true in files of a stored run.

    Args:
        root: the tree of the config.
        sources: which files belong to a stored run.
        faults: receives an error for each former value in another file.
    """
    section, written = root.at("checkpoint"), root.at("checkpoint", "async")
    if section is None or written is None or written.value not in FORMER_WRITERS:
        return root
    if not (stored := sources.stored_at(written)):
        what = f"found {written.value!r}: {_REMOVED}"
        hint = "write `true` instead"
        faults.append(ConfigError(what, where=written.place(), accepted="true or false", hint=hint))
    return root.put("checkpoint", section.put("async", written.holding(True if stored else FAILED)))
