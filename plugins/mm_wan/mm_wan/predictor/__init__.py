"""Wan's transformers, one or two of them, and their operation counts."""
