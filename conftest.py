"""Tests that run in several processes (`-n 2`) take one thread each, set before torch is imported."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
