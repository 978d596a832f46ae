"""run.deterministic: non-deterministic kernels are refused, from the first step of a run."""

from __future__ import annotations

import pytest

from support import warm

NPU = """
import os, sys, types, torch
config = types.SimpleNamespace(allow_internal_format=True)
npu = types.ModuleType("torch.npu")
npu.config, npu.is_available, npu.device_count = config, lambda: True, lambda: 1
from mm_core.device import kernels
kernels.device_type = lambda: "npu"
torch.get_device_module = lambda name: npu
os.environ["LCCL_DETERMINISTIC"] = "0"
print(kernels.set_deterministic(), config.allow_internal_format, os.environ["HCCL_DETERMINISTIC"])
"""  # a mock of what cannot exist here

SCRIPT = """
import os, torch
from mm_core.device import set_deterministic
torch.backends.cudnn.benchmark = True
set_deterministic()
assert not torch.backends.cudnn.benchmark
torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))  # which one stays is left to chance
"""


def test_a_kernel_that_varies_is_an_error():
    done = warm.run(["-c", SCRIPT])
    assert "put_ does not have a deterministic implementation" in done.stderr and done.returncode == 1


def test_the_whole_list_of_a_mocked_npu_is_set_and_returned():
    done = warm.run(["-c", NPU])
    assert done.returncode == 0, done.stderr
    for setting in (
        *("torch.use_deterministic_algorithms=True", "HCCL_DETERMINISTIC=true", "CLOSE_MATMUL_K_SHIFT=1"),
        *("LCCL_DETERMINISTIC=0", "allow_internal_format=False", " False true"),
    ):
        assert setting in done.stdout


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
        done = mm(
            *command, f"run.deterministic={wanted}", f"run.name=run_{wanted}", "run.float32_matmul=high"
        )
        assert done.code == 0, done.err
        assert f"deterministic {wanted.capitalize()}" in done.out
        log = (tmp_path / f"run_{wanted}/logs/rank_0.log").read_text()
        assert ("torch.use_deterministic_algorithms=True" in log) == (wanted == "true")
        assert "torch.set_float32_matmul_precision('high')" in log
