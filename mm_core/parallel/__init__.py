"""How modules are spread over ranks: sharding layout, placing of frozen parts, recomputation, averaging."""
