"""Parts that only some runs have: features from the cache, records for `mm align`."""
