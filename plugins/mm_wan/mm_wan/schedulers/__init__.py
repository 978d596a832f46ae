"""Wan's noise schedule and its samplers."""
