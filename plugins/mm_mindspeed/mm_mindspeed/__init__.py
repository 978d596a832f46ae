"""Runs of MindSpeed-MM as runs of mm_core."""
