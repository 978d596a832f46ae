"""The dtypes in which inputs reach a module and its outputs leave it."""

from __future__ import annotations

import pytest
import torch
from mm_custom_dit.model import CustomDiT
from torch import nn

from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import ContractError
from mm_core.runtime.process_group import process_group
from support.tiny_models import Task


class Seeing(nn.Module):
    """Records the dtypes of its inputs, and computes in that of its weight or of its input."""

    def __init__(self, own_cast: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.own_cast = own_cast
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        self.seen = {"x": x.dtype, "timestep": timestep.dtype, "weight": self.inner.weight.dtype}
        return self.inner(x.to(self.inner.weight.dtype) if self.own_cast else x) + 0

    def init_weights(self) -> None:
        self.inner.reset_parameters()


def prepared(build, **fields):
    with torch.device("meta"):
        task = Task(predictor=build())
    engine = FSDP2Engine(**fields)
    plan = engine.plan(task, 1, 2)
    engine.prepare(task, plan, lambda p: torch.optim.AdamW(p.values(), lr=0.1), Randomness(0))
    return task.predictor, engine


def step(predictor, engine, *args, **named) -> torch.Tensor:
    outputs = []

    def compute() -> Loss:
        outputs.append(predictor(*args, **named))
        return Loss(outputs[0].float().square().sum(), 1.0)

    engine.micro_step(compute, last=True, scale=1.0)
    return outputs[0].detach()


@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("output", [None, "fp32", "bf16"])
def test_inputs_and_outputs_have_the_dtypes_that_the_config_names(cast, output):
    with process_group():
        predictor, engine = prepared(
            lambda: Seeing(own_cast=not cast),
            param_dtype="bf16",
            cast_forward_inputs=cast,
            output_dtype=output,
        )
        out = step(predictor, engine, torch.ones(2, 4), torch.tensor([998.7, 1.0]))
    assert predictor.seen == {
        "x": torch.bfloat16 if cast else torch.float32,
        "timestep": torch.float32,
        "weight": torch.bfloat16,
    }
    assert out.dtype == (torch.float32 if output == "fp32" else torch.bfloat16)


def test_without_a_param_dtype_nothing_is_cast():
    with process_group():
        predictor, engine = prepared(lambda: Seeing(own_cast=False), output_dtype="bf16")
        out = step(predictor, engine, torch.ones(2, 4), torch.ones(2))
    assert set(predictor.seen.values()) == {torch.float32} and out.dtype == torch.bfloat16


SENTENCE = (
    "engine.cast_forward_inputs: with false, the model must cast its inputs itself, but its bf16 weights got"
    " inputs of a different dtype: "
)


@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_a_model_that_does_not_cast_is_named_with_the_key(where):
    with process_group():
        predictor, engine = prepared(
            lambda: Seeing(own_cast=False), param_dtype="bf16", cast_forward_inputs=False
        )
        with pytest.raises(ContractError) as fault:
            if where == "training":
                step(predictor, engine, torch.ones(2, 4), torch.ones(2))
            with engine.evaluating():
                predictor(torch.ones(2, 4), torch.ones(2))
    text = str(fault.value)
    assert text.startswith(SENTENCE) and "float and bfloat16" in text.lower()
    assert text.endswith(
        "\n  hint: set engine.cast_forward_inputs: true, or cast inputs to the weights' dtype in the model"
    )


def test_other_faults_and_other_settings_keep_their_words():
    def fail(_: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with process_group():
        for cast in (True, False):
            predictor, engine = prepared(
                lambda: Seeing(own_cast=True), param_dtype="bf16", cast_forward_inputs=cast
            )
            predictor.forward = fail
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                step(predictor, engine, torch.ones(2, 4), torch.ones(2))


def dit() -> CustomDiT:
    return CustomDiT(
        num_layers=2,
        num_heads=2,
        head_dim=12,
        patch_size=(1, 2, 2),
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        rope_max_seq_len=16,
    )


@pytest.mark.parametrize("recomputed", [(), "auto"])
def test_our_own_dit_casts_itself_to_the_same_bits(recomputed):
    rng = Randomness(1).at("rows", 0)
    given = {
        "latents": rng.normal((2, 4, 2, 4, 4), "latents"),
        "timestep": torch.tensor([998.7, 3.0]),
        "text": rng.normal((2, 5, 16), "text"),
        "text_mask": torch.arange(5)[None] < torch.tensor([5, 3])[:, None],
    }
    found = []
    for cast in (True, False):
        with process_group():
            fields = {"cast_forward_inputs": cast, "recompute_modules": recomputed}
            predictor, engine = prepared(dit, param_dtype="bf16", **fields)
            with torch.no_grad():
                predictor.proj_out.weight.to_local().fill_(0.1)
            out = step(predictor, engine, **given)
            gradients = {name: p.grad.to_local().clone() for name, p in engine.named_parameters()}
        found.append((out.float(), gradients))
    assert torch.equal(found[0][0], found[1][0]) and float(found[0][0].abs().max()) > 0
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])
    assert out.dtype == torch.float32, "in the dtype of the latents that it was given"
