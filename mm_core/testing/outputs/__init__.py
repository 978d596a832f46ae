"""Conformance kits of what a run gives out: figures of metrics, trackers, callbacks and weights files."""
