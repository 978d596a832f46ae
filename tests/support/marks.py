"""Conditions on the installed torch under which tests are skipped."""

from __future__ import annotations

import pytest
import torch

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is from 2.9")
