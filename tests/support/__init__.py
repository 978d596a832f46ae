"""Support code for tests of several rooms, imported as `support`: tests/ is on the path (pyproject.toml).

It starts ranks, makes tiny models and runs, compares tensors, and contains one-file plugins and rank scripts.
"""
