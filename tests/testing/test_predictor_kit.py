"""Each check of predictors fails for a good predictor with one wrong line, and no other check does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mm_core.testing import PREDICTOR_CHECKS, PredictorProbe
from mm_core.testing.kit import Examination, NotApplicable
from support.conformance import edited, failed, shortcomings

GOOD = Path(__file__).with_name("good_predictor.py")
ON_RANKS = ("sharded_training", "sharded_checkpoint", "context_parallel")
ELSEWHERE = ("compiles", "given_frames", "experts", "guided", "given_inputs")
"""Tested below, and in test_predictor_capabilities.py."""
ALONE = [name for name in PREDICTOR_CHECKS if name not in (*ON_RANKS, *ELSEWHERE)]


def examination(folder: Path, old: str = "", new: str = "") -> Examination:
    """The good predictor with a line replaced."""
    return edited(GOOD, folder, "predictor", old, new)


def test_the_good_predictor_passes(tmp_path: Path) -> None:
    outcomes = [examination(tmp_path).run(name) for name in ALONE]
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("passed", "")] * len(ALONE)


FAULTS = {
    "attributes": ("patch_size = (1, 2, 2)", "patch_size = (2, 2)", "patch_size is (2, 2)"),
    "meta_build": (
        'self.register_buffer("waves", torch.empty(8))',
        'self.register_buffer("waves", torch.empty(8, device="cpu"))',
        "these tensors are not: waves; accepted: tensors created on the default device",
    ),
    "initialisation": (
        "        nn.init.constant_(self.scale, 1.5)\n",
        "",
        "scale",
    ),
    "output": (
        "x.reshape(b, c, t, h, w).to(latents.dtype)",
        "x.reshape(b, c, t, h, w).to(latents.dtype)[:2]",
        "the predictor's output has the shape (2, 4, 2, 6, 4); accepted: (3, 4, 2, 6, 4)",
    ),
    "odd_sizes": (
        "        for block in self.blocks:",
        "        x = x if x.shape[1] % 2 == 0 else x.reshape(b, -1, 2, x.shape[2]).flatten(1, 2)\n"
        "        for block in self.blocks:",
        "the predictor fails for latents of (T, H, W) = (3, 10, 2): RuntimeError: shape",
    ),
    "one_frame": (
        "x = self.head(x * self.scale.to(dtype))",
        "x = self.head(x * self.scale.to(dtype)) / min(1, t - 1)",
        "the predictor's output contains NaN or infinity",
    ),
    "gradients": (
        "x * self.scale.to(dtype)",
        "x * self.scale.detach().to(dtype)",
        "the output does not depend on scale; accepted: a gradient for each parameter with requires_grad",
    ),
    "determinism": (
        "x = self.head(x",
        "x = self.head(torch.nn.functional.dropout(x, 0.5)",
        "equal inputs give different outputs",
    ),
    "independence": (
        "given = words.sum(1)",
        "given = latents.mean().to(dtype) + words.sum(1)",
        "the outputs for a sample alone and as row 0 of a batch differ by",
    ),
    "inputs_unchanged": (
        "b, c, t, h, w = latents.shape",
        "b, c, t, h, w = latents.clamp_(-1, 1).shape",
        "the predictor changes its input `latents`; hint: use no in-place operation on an input",
    ),
    "text_padding": (
        "given = words.sum(1) / real.sum(1).clamp(min=1)",
        "given = words.mean(1)",
        "longer padding changes the output, by",
    ),
    "timestep_precision": (
        "angles = timestep[:, None] *",
        "angles = timestep.round()[:, None] *",
        "in torch.float32, timestep 998.7 is rounded to 999",
    ),
    "unknown_conditions": (
        "pooled, fps=None):",
        "pooled, fps=None, **more):",
        "the predictor silently ignores an unknown condition",
    ),
    "missing_conditions": (
        "pooled, fps=None):",
        "pooled=None, fps=None):",
        "the predictor fails without `pooled`: AttributeError: 'NoneType' object has no attribute 'to'",
    ),
    "flops": (
        'linear_flops("head", rows, width, 4 * c)',
        'linear_flops("head", 2 * rows, width, 4 * c)',
        "operations for the forward, but torch counts",
    ),
    "sharding_plan": (
        'ShardPlan(wrap=("blocks.{*}",)',
        'ShardPlan(wrap=("blocks",)',
        "predictor.shard_plan().wrap: 'predictor.blocks' is a container, which the forward never calls",
    ),
    "recomputation": (
        "        return x + self.last(torch.tanh(self.first(x + given[:, None])))",
        "        self.calls = getattr(self, 'calls', 0) + self.training\n"
        "        return x + self.last(torch.tanh(self.first(x + given[:, None])) * (1 + self.calls % 2))",
        "with blocks.0 and the like recomputed, other gradients come out for",
    ),
    "mixed_precision": (
        "self.pool(pooled.to(dtype))",
        "self.pool(pooled.to(dtype) + self.waves[:5])",
        "with engine.param_dtype: bf16, the predictor fails: RuntimeError: mat1 and mat2 must have the same",
    ),
}
ALSO = {
    "output": {"independence"},
    "attributes": {*ALONE},
    "initialisation": {*ALONE},
    "determinism": {"independence", "text_padding"},
}
"""Check -> checks that cannot pass either with its fault."""


@pytest.mark.parametrize("check", FAULTS)
def test_a_wrong_line_fails_the_check_that_is_for_it(check: str, tmp_path: Path) -> None:
    old, new, sentence = FAULTS[check]
    found = failed(examination(tmp_path, old, new), ALONE)
    assert sentence in found[check].reason
    assert str(tmp_path / GOOD.name) in found[check].reason, "the author's file"
    assert found.keys() - ALSO.get(check, set()) <= {check}


RETURN = "return x.reshape(b, c, t, h, w).to(latents.dtype).clone()"
BROKEN = """
        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return grad * float("nan") if grad.dtype == torch.bfloat16 and CONDITION else grad

        return Broken.apply(x.reshape(b, c, t, h, w)).to(latents.dtype)"""
WAVES = 'self.register_buffer("waves", torch.empty(8))'


def kept(tables: str, used: str) -> str:
    """A constructor that keeps tensors which are neither parameters nor buffers, and their use."""
    hook = f"self.register_forward_pre_hook(lambda module, _: [{used}] and None)"
    return f"{WAVES}; self.tables = {tables}; {hook}"


@pytest.mark.parametrize(
    ("old", "new", "check", "sentence"),
    [
        (
            WAVES,
            kept("[torch.empty(8)]", "module.tables[0].to(module.waves.device)"),
            "initialisation",
            "tensors of tables are neither parameters nor buffers, and stay on the meta",
        ),
        (
            WAVES,
            kept('type("Rope", (), {})()', "module.tables.angles.to(module.waves.device)")
            + "; self.tables.angles = torch.empty(8)",
            "initialisation",
            "tensors of tables are neither parameters nor buffers, and stay on the meta",
        ),
        (
            "words = self.words(text.masked_fill(",
            "words = self.words(text.masked_fill_(",
            "inputs_unchanged",
            "the predictor changes its input `text`",
        ),
        (
            RETURN,
            BROKEN.replace("CONDITION", "True"),
            "mixed_precision",
            "in bf16, gradients are not finite: blocks.0.first.bias, blocks.0.first.weight, ",
        ),
    ],
)
def test_a_fault_of_the_same_check_is_found(
    old: str, new: str, check: str, sentence: str, tmp_path: Path
) -> None:
    of = examination(tmp_path, old, new)
    assert sentence in of.run(check).reason


def test_tensors_that_the_forward_makes_again_may_stay_on_meta(tmp_path: Path) -> None:
    again = kept("[torch.empty(8)]", 'setattr(module, "tables", [torch.ones(8, device=module.waves.device)])')
    assert examination(tmp_path, WAVES, again).run("initialisation").status == "passed"


def test_gradients_that_torch_s_onednn_breaks_are_not_the_predictor_s_fault(tmp_path: Path) -> None:
    """A stand-in: oneDNN's convolutions do so on some CPUs in some runs; here a function does so in all."""
    of = examination(tmp_path, RETURN, BROKEN.replace("CONDITION", "torch.backends.mkldnn.enabled"))
    assert of.run("mixed_precision").status == "passed"


def test_a_predictor_that_hardly_reacts_to_the_timestep_does_not_round_it(tmp_path: Path) -> None:
    of = examination(tmp_path, "angles = timestep[:, None] *", "angles = 1e-5 * timestep[:, None] *")
    assert of.run("timestep_precision").status == "passed"


def test_an_unset_buffer_is_one_failure(tmp_path: Path) -> None:
    of = examination(tmp_path, "        self.waves.copy_(10 ** -torch.linspace(0, 3, 8))\n", "")
    outcomes = list(of)
    assert [outcome.check for outcome in outcomes if outcome.status == "failed"] == ["initialisation"]
    assert outcomes[-1].reason == "not run, because initialisation has failed"


def test_every_check_has_a_fault() -> None:
    assert {*FAULTS, *ON_RANKS, *ELSEWHERE} == {*PREDICTOR_CHECKS}


@pytest.mark.slow
def test_a_forward_that_breaks_the_graph_does_not_compile(tmp_path: Path) -> None:
    for folder in ("good", "broken"):
        (tmp_path / folder).mkdir()
    assert examination(tmp_path / "good").run("compiles").status == "passed"
    old = "x = self.head(x * self.scale.to(dtype))"
    of = examination(tmp_path / "broken", old, f"{old} if latents.sum().item() else x")
    reason = of.run("compiles").reason
    assert f"{tmp_path}/broken/{GOOD.name}, line" in reason
    assert "torch.compile does not take forward as one graph: " in reason
    assert "hint: branch on shapes and options alone, not on values of tensors" in reason


@pytest.mark.slow
def test_two_ranks_train_the_good_predictor_as_one(tmp_path: Path) -> None:
    of = examination(tmp_path)
    assert [of.run(name).reason for name in ON_RANKS] == [
        "",
        "",
        "it is no mm_core.contracts.SupportsContextPlan",
    ]


@pytest.mark.slow
def test_a_parameter_that_is_read_outside_of_its_block_fails_on_two_ranks(tmp_path: Path) -> None:
    new = "x = self.head(x * self.blocks[0].last.bias.sum().to(dtype) * self.scale.to(dtype))"
    of = examination(tmp_path, "x = self.head(x * self.scale.to(dtype))", new)
    assert not failed(of, ["output", "gradients", "recomputation"])
    outcome = of.run("sharded_training")
    assert outcome.status == "failed"
    assert "on 2 ranks, the predictor fails: " in outcome.reason
    assert f"{tmp_path / GOOD.name}, line" in outcome.reason
    assert "use parameters in the forward of the module that owns them" in outcome.reason
    assert of.run("sharded_checkpoint").status == "not applicable"


@pytest.mark.slow
def test_a_buffer_that_depends_on_the_rank_s_samples_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    old = "b, c, t, h, w = latents.shape"
    of = examination(tmp_path, old, f"self.waves[0] += latents.mean().item() * self.training\n        {old}")
    outcome = of.run("sharded_checkpoint")
    assert outcome.status == "failed"
    assert "predictor.waves differs between the ranks" in outcome.reason


def test_a_predictor_of_a_local_function_is_not_sent_to_other_processes() -> None:
    probe = PredictorProbe(lambda: torch.nn.Linear(2, 2))
    with pytest.raises(NotApplicable, match=r"cannot be built in another process .*: name a component"):
        PREDICTOR_CHECKS["sharded_training"](probe)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["custom_dit/custom_dit", "wan/transformer", "wan/two_expert"])
def test_shipped_predictors_pass(name: str) -> None:
    assert shortcomings(name) == []
