"""`mm-train --dry-run --ops`: the operators of a step without its weights are those of a real one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mm_core.config.load import load_config
from mm_core.device.operators import kernel_on
from mm_core.errors import MMError
from mm_core.telemetry.operators import Calls, Operators, listed, table
from mm_core.training.optional.operators import first_forward, operators_of

ROOT = Path(__file__).parents[2]
NOT_COMPARED = {
    *(
        "aten::detach",
        "aten::detach_",
        "aten::alias",
        "aten::as_strided",
        "aten::view",
        "aten::_reshape_alias",
    ),
    *("aten::slice", "aten::empty", "aten::ones_like", "aten::scalar_tensor"),
}
"""Views and empty tensors, which compute nothing: torch chooses others of them when it is watched."""
SAME = {"aten::min": "aten::minimum", "aten::log_softmax": "aten::_log_softmax", "aten::add_": "aten::add"}
"""Operator -> the only one that it calls; and sums of gradients, which torch, unwatched, adds in place."""


def has(operator: str, key: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key))
    except RuntimeError:  # an overload of TorchScript alone
        return False


def is_composed(name: str) -> bool:
    schemas = torch._C._jit_get_schemas_for_operator(name)
    names = [f"{s.name}.{s.overload_name}".rstrip(".") for s in schemas]
    implicit = any(has(each, "CompositeImplicitAutograd") for each in names)
    own = any(has(each, key) for each in names for key in ("CPU", "CompositeExplicitAutograd"))
    return name == "aten::linear" or (implicit and not own)


def outermost(event: Any, counts: Counter[str]) -> None:
    """Counts the operators of a profile, without those that kernels call and those that only call others."""
    if event.name.startswith("aten::") and not is_composed(event.name):
        counts[event.name] += 1
        return
    for child in event.cpu_children:
        outermost(child, counts)


def make_real(module: nn.Module) -> None:
    known: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    drawn = torch.full(tensor.shape, 0.01, device="cpu").to(tensor.dtype)
                    made = nn.Parameter(drawn, tensor.requires_grad) if held is owner._parameters else drawn
                    held[name] = known.setdefault(id(tensor), made)


def profiled(config: Any) -> Counter[str]:
    forward = first_forward(config)
    make_real(forward.task)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        forward.backward()
    counts: Counter[str] = Counter()
    for event in profiler.events():
        if event.cpu_parent is None:
            outermost(event, counts)
    return counts


def compared(counts: Counter[str]) -> Counter[str]:
    joined: Counter[str] = Counter()
    for name, count in counts.items():
        joined[SAME.get(name, name)] += count * (name not in NOT_COMPARED)
    return +joined


@pytest.mark.slow
@pytest.mark.parametrize("family", ["quickstart", "wan", "internvl"])
def test_operators_and_counts_are_those_of_a_real_step(
    family: str, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ["engine.recompute_modules=[]"]  # a profile counts the operator that recomputing stops at
    if family == "wan":
        from mm_wan.testing import make_tiny_checkpoint

        folder = make_tiny_checkpoint(tmp_path / "wan")
        data = {
            "type": "video_text",
            "annotations": str(shapes / "data.json"),
            "num_frames": 5,
            "height": 16,
            "width": 16,
        }
        options = [*plain, f"data.train={json.dumps(data)}", "data.validation=null", "validation=null"]
        parts = ("predictor", "autoencoder", "text_encoder")
        places = ("", "/vae", "/text_encoder")
        options += [
            f"task.{p}.from_pretrained={folder}{place}" for p, place in zip(parts, places, strict=True)
        ]
        config = load_config(ROOT / "plugins/mm_wan/mm_wan/configs/t2v_tiny.yaml", options)
    elif family == "quickstart":  # its text encoder loads itself
        options = [*plain, f"data.train.annotations={shapes / 'data.json'}", "task.predictor.num_layers=1"]
        config = load_config(ROOT / "configs/custom_dit/quickstart.yaml", options)
    else:
        from mm_internvl.testing import make_tiny_checkpoint as make_internvl
        from mm_internvl.testing import make_tiny_conversations

        folder = make_internvl(tmp_path / "internvl")
        make_tiny_conversations(tmp_path / "digits")
        text = (ROOT / "plugins/mm_internvl/mm_internvl/configs/tiny.yaml").read_text()
        text = text.replace("ckpt/internvl_tiny", str(folder)).replace("data/digits", f"{tmp_path}/digits")
        (tmp_path / "tiny.yaml").write_text(text)
        config = load_config(tmp_path / "tiny.yaml", [*plain, "task.loss=plain"])
    counts: Counter[str] = Counter()
    for (name, *_), calls in operators_of(first_forward(config)).items():
        counts[name.partition(".")[0]] += calls.count
    assert counts["aten::mm"] > 20
    # Before its first step a run also tries whether packed conversations are kept apart.
    monkeypatch.setattr("mm_core.tasks.pretrained.task.check_packing", lambda *_: None)
    assert compared(counts) == compared(profiled(config))


def test_the_work_of_a_product_is_counted_and_views_move_no_bytes() -> None:
    calls: dict[Any, Calls] = {}
    with Operators(calls):
        torch.ones(4, 6).view(6, 4).t() @ torch.ones(6, 8)
    product = calls["aten::mm", ((4, 6), (6, 8)), ("float32", "float32")]
    assert (product.count, product.flops, product.bytes) == (1, 2 * 4 * 6 * 8, 4 * (24 + 48 + 32))
    assert calls["aten::t", ((6, 4),), ("float32",)].bytes == 0
    head, first, *_ = table(listed(calls, "cpu"))
    assert first == ("aten::mm", "float32", "1", "0.000", "0.0", "native", "[4,6] [6,8]") and "calls" in head


def test_a_device_that_is_not_here_is_unknown_and_others_are_refused() -> None:
    assert kernel_on("aten::mm", "npu") == "unknown"
    assert kernel_on("aten::clone", "cpu") == "decomposed"
    with pytest.raises(MMError, match="'tpu' is no kind of device"):
        kernel_on("aten::mm", "tpu")
