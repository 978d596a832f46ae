"""run.deterministic: non-deterministic kernels are refused, from the first step of a run."""

from __future__ import annotations

import pytest

from support import warm

SCRIPT = """
import os, torch
from mm_core.device import set_deterministic
torch.backends.cudnn.benchmark = True
set_deterministic()
assert not torch.backends.cudnn.benchmark and os.environ["CUBLAS_WORKSPACE_CONFIG"]
torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))  # which one stays is left to chance
"""


def test_a_kernel_that_varies_is_an_error():
    done = warm.run(["-c", SCRIPT])
    assert "put_ does not have a deterministic implementation" in done.stderr and done.returncode == 1


@pytest.mark.slow
def test_a_run_is_deterministic_by_its_config(tiny, tmp_path, mm):
    (tmp_path / "watch.py").write_text(
        "import torch\n"
        "from mm_core import Component, hookimpl\n"
        "from mm_core.contracts import Callback\n"
        "class Watch(Callback):\n"
        "    def run_started(self, run_dir, step, last_step):\n"
        "        print('deterministic', torch.are_deterministic_algorithms_enabled())\n"
        "@hookimpl\n"
        "def mm_callbacks():\n"
        "    return [Component(name='watch', target='watch:Watch', config='watch:Config')]\n"
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Config:\n"
        "    pass\n"
    )
    command = (
        "train",
        "--config",
        tiny,
        f"run.dir={tmp_path}",
        "train.steps=1",
        "lr_schedule={type: constant}",
    )
    command += (f"plugins.path=[{tmp_path / 'watch.py'}]", "callbacks=[{type: local/watch}]")
    for wanted in ("true", "false"):
        done = mm(*command, f"run.deterministic={wanted}", f"run.name=run_{wanted}")
        assert done.code == 0, done.err
        assert f"deterministic {wanted.capitalize()}" in done.out
