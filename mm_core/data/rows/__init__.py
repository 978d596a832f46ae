"""Annotation files (JSON, JSON lines, CSV, Parquet) and prompts: the rows in them and the paths they name."""
