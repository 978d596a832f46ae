"""The YAML of a run: sections, strict reading, interpolation, overrides, the config of a stored run."""
