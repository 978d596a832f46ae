"""Commands on weights: planning and writing an export, importing, listing and comparing.

Migrations, which read the runs of other tools, import their names from here.
"""

from mm_core.interchange.migration.migrated import Left, Line, Migrated, Migration, to_yaml
from mm_core.interchange.migration.scripts import Program, Script, Unrun, Word
from mm_core.interchange.migration.shell import read_script
from mm_core.interchange.migration.sources import read_source
from mm_core.interchange.migration.table import (
    NOTHING,
    UNKNOWN,
    Default,
    Differs,
    Drop,
    Instead,
    Key,
    Row,
    SupportsKeys,
    apply,
    is_loose,
    node_at,
    place_of,
    value_at,
)
from mm_core.interchange.migration.tools import foreign, migration_of, ours_of
from mm_core.schema.nodes import Node, to_python

__all__ = [
    "NOTHING",
    "UNKNOWN",
    "Default",
    "Differs",
    "Drop",
    "Instead",
    "Key",
    "Left",
    "Line",
    "Migrated",
    "Migration",
    "Node",
    "Program",
    "Row",
    "Script",
    "SupportsKeys",
    "Unrun",
    "Word",
    "apply",
    "foreign",
    "is_loose",
    "migration_of",
    "node_at",
    "ours_of",
    "place_of",
    "read_script",
    "read_source",
    "to_python",
    "to_yaml",
    "value_at",
]
