"""The config of a run: its sections, reading YAML strictly, overrides, writing it again. Without torch."""
