"""Runs of other trainers as runs of mm_core."""
