"""Values that earlier versions took and this one does not: read in the config of a stored run, refused in any
other."""

from __future__ import annotations

from dataclasses import replace

from mm_core.config.stored import Sources
from mm_core.errors import ConfigError, MMError
from mm_core.plugin.schema.nodes import FAILED, Node

_WRITERS = ("process", "thread")
"""What `checkpoint.async` took beside true and false."""
_REMOVED = "the process mode was removed, and a thread writes every asynchronous save"


def without_former_values(root: Node, sources: Sources, faults: list[MMError]) -> Node:
    """The tree with `checkpoint.async: process` and `thread` of a stored file as true. Elsewhere each is a
    fault."""
    section = root.value.get("checkpoint")
    if section is None or not isinstance(section.value, dict):
        return root
    written = section.value.get("async")
    if written is None or written.value not in _WRITERS:
        return root
    if sources.stored_at(written):
        written = replace(written, value=True)
    else:
        what = f"found {written.value!r}: {_REMOVED}"
        place = written.place()
        faults.append(ConfigError(what, where=place, accepted="true or false", hint="write `true` instead"))
        written = replace(written, value=FAILED)
    section = replace(section, value={**section.value, "async": written})
    return replace(root, value={**root.value, "checkpoint": section})
