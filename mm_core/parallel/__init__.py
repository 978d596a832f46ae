"""How modules are spread: path patterns, sharding layout, recomputation, initialisation."""
