"""The way from `train` to the optimizer's step is short enough to read."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

from mm_core.config.load import load_config
from mm_core.train import loop, run

pytestmark = pytest.mark.slow


def test_from_train_to_the_update_in_three_files_and_200_lines(tiny, tmp_path, monkeypatch):
    """The functions on the stack when the optimizer steps, found in a real run, each counted whole."""
    found: list[tuple[str, str]] = []
    step = torch.optim.AdamW.step

    def watched(self, *args, **kwargs):
        frame = sys._getframe()
        while frame is not None and not found:
            chain = []
            while frame is not None:
                if "/mm_core/" in frame.f_code.co_filename:
                    chain.append((frame.f_code.co_filename, frame.f_code.co_qualname))
                frame = frame.f_back
            if chain[0][1] == "FSDP2Engine.step":  # not the probe for the fused kernel
                found.extend(chain)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    overrides = [
        "train.steps=1",
        "lr_schedule={type: constant}",
        f"run.dir={tmp_path}",
        "data.loader.workers=0",
    ]
    run.train(load_config(tiny, overrides))
    names = [name for _, name in found]
    assert names == ["FSDP2Engine.step", "run_steps", "train"]
    assert len({file for file, _ in found}) == 3
    from mm_core.engines.fsdp2 import FSDP2Engine

    lines = sum(len(inspect.getsourcelines(f)[0]) for f in (FSDP2Engine.step, loop.run_steps, run.train))
    assert lines <= 200
    assert len(inspect.getsource(loop).splitlines()) <= 200, "the whole loop, its protocols included"
