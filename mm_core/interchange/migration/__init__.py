"""Runs of other tools as configs of ours: readers of their files, tables of their keys, what is left over."""
