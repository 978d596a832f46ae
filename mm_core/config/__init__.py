"""The config of a run: sections, components named, YAML read strictly, overrides, writing. No torch."""
