"""Comparing two records of `mm align record`: the first number that differs, and how it grows."""
