"""Rows of annotation files (JSON, JSON lines, CSV, Parquet) and prompt files, and the paths in them."""
