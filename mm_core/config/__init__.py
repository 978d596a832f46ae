"""The config of a run: schema, strict loading, and writing it again. Imports no torch."""
