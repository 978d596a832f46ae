"""Values against typed dataclasses: nodes that know where they are from, checking, faults, describing."""
