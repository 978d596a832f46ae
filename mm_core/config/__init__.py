"""The config (YAML) of a run: sections, strict reading, interpolation, overrides, configs of stored runs."""
