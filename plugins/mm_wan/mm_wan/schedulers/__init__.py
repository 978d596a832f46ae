"""Wan's noise schedule and the solvers that sample by it."""
