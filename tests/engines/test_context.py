"""Ranks that share the tokens of a sample train as one rank that has all of them.

With SGD, a step is as exact as its gradient.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.ranks import run_ranks

SCRIPT = Path(__file__).with_name("context_ranks.py")
UNEVEN = {"patches": [3, 3, 3]}  # 27 tokens
IMAGE = {"image_latents": [5, 3, 6, 6], "image_embeds": [5, 10]}
BLOCKS = ["predictor.blocks.{*}"]
CASES = {
    "plain": {"predictor": "custom_dit"},
    "weighted": {"predictor": "custom_dit", "weights": [0.5, 2, 1, 3], **UNEVEN},
    "three heads": {"predictor": "wan", "more": {"num_attention_heads": 3}, **UNEVEN},
    "one head": {"predictor": "custom_dit", "more": {"num_heads": 1}, **UNEVEN},
    "timesteps of tokens": {"predictor": "wan", "per_token": True, **UNEVEN},
    "images": {
        "predictor": "wan",
        "more": {"in_channels": 9, "image_dim": 10, "added_kv_proj_dim": 48},
        "conditions": IMAGE,
        **UNEVEN,
    },
    "recomputed": {"predictor": "wan", "recompute_modules": BLOCKS, "per_token": True, **UNEVEN},
    "on the host": {
        "predictor": "custom_dit",
        "weights": [0.5, 2, 1, 3],
        "adapters": True,
        "recompute_modules": BLOCKS,
        "recompute": "selective",
        "base": {"stream": True},
        "offload": {"activations": "cpu"},
        **UNEVEN,
    },
    "experts": {"predictor": "two_expert"},
    "experts, many rows": {"predictor": "two_expert", "weights": [0.5, 2, 1, 3, 0, 1, 1, 2, 1, 0.5, 4, 1]},
}
BARS = {"ulysses": 1e-6, "ring": 1e-6}
pytestmark = pytest.mark.slow


def ranks(world: int, folder: Path, cases: dict[str, dict]) -> dict[str, dict]:
    run_ranks(SCRIPT, world, folder / f"{world}.pt", json.dumps(cases))
    return torch.load(folder / f"{world}.pt")


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict[str, dict]:
    return ranks(1, tmp_path_factory.mktemp("one"), CASES)


def error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of a tensor, and its name."""
    assert found.keys() == wanted.keys()
    return max((float((found[n] - t).norm() / t.norm()), n) for n, t in wanted.items())


def close(found: dict, wanted: dict, bar: float) -> None:
    gradients, weights = (error(found[part], wanted[part]) for part in ("gradients", "weights"))
    assert gradients < (bar, ""), gradients
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert weights < (1e-5, ""), weights
    assert wanted["losses"][-1] < 0.9 * wanted["losses"][0]


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_share_each_sample(one, tmp_path, world):
    kinds = {f"{kind} {name}": (kind, name) for kind in BARS for name in CASES if "many" not in name}
    del kinds["ulysses one head"]
    cases = {key: {**CASES[name], "size": world, "kind": kind} for key, (kind, name) in kinds.items()}
    found = ranks(world, tmp_path, cases)
    for key, (kind, name) in kinds.items():
        close(found[key], one[name], BARS[kind])


def test_groups_of_ranks_have_samples_of_their_own_and_shards_or_replicas(one, tmp_path):
    cases = {
        f"{kind} {shards}": {**CASES["weighted"], "size": 2, "kind": kind, "sharding_size": shards}
        for kind in BARS
        for shards in (2, 4)
    }
    for key, found in ranks(4, tmp_path, cases).items():
        close(found, one["weighted"], BARS[key.split()[0]])


@pytest.mark.parametrize(("world", "fields"), [(3, {}), (4, {"sharding_size": 2})])
def test_two_experts_train_on_ranks_with_samples_of_their_own(one, tmp_path, world, fields):
    name = "experts, many rows"
    close(ranks(world, tmp_path, {name: {**CASES[name], **fields}})[name], one[name], 1e-6)


def test_a_wrong_scale_is_seen_in_gradients(one, tmp_path):
    """Adam divides it out: these losses are the same, and those of SGD are not."""
    found = ranks(2, tmp_path, {"wrong": {**CASES["weighted"], "size": 2, "planted": True}})["wrong"]
    assert error(found["gradients"], one["weighted"]["gradients"])[0] == pytest.approx(0.5, rel=1e-4)
    with pytest.raises(AssertionError):
        close(found, one["weighted"], 0.1)
    assert found["losses"][-1] > 1.1 * one["weighted"]["losses"][-1]


def test_ranks_send_what_the_formula_says(tmp_path):
    """As in docs/long-clips.md: here 16 tokens in 2 blocks of width 48, patches of 4 x 4 numbers, float32."""
    tokens, width, patch = 16, 48, 16
    plain = {**CASES["plain"], "steps": 1, "double": False}
    again = {**plain, "recompute_modules": BLOCKS}
    for world in (2, 4):
        cases = {f"{kind} {name}": {**case, "size": world, "kind": kind} for kind in BARS
                 for name, case in {"kept": plain, "again": again}.items()}  # fmt: skip
        found = {key: outcome["sent"] for key, outcome in ranks(world, tmp_path, cases).items()}
        own, others = tokens // world, world - 1
        whole = 4 * own * patch * others
        ulysses, ring = 4 * own * width * others // world, 2 * own * width * others
        assert found["ulysses kept"] == whole + 2 * 4 * 2 * ulysses
        assert found["ulysses again"] == whole + 2 * 4 * 3 * ulysses
        home = 2 * own * width * world  # gradients of keys and values also go home
        assert found["ring kept"] == whole + 2 * 4 * (2 * ring + home)
        assert found["ring again"] == whole + 2 * 4 * (3 * ring + home)


def test_two_ranks_need_half_of_the_memory_for_activations(tmp_path):
    """What a step of two tokens allocates is of the weights and their gradients, not of activations."""
    kept = {"predictor": "custom_dit", "weights": [1.0], "measured": True, "double": False}
    kept |= {"more": {"head_dim": 32, "ffn_dim": 256}}
    cases = {"kept": kept, "again": {**kept, "recompute_modules": BLOCKS}}
    cases["attention"] = {**cases["again"], "recompute": ["attention"]}

    def activations(world: int, **context: object) -> dict[str, int]:
        sizes = {"large": [16, 16, 16], "small": [1, 1, 2]}
        both = {f"{name} {size}": {**case, **context, "patches": patches} for name, case in cases.items()
                for size, patches in sizes.items()}  # fmt: skip
        peaks = {key: found["peak"] for key, found in ranks(world, tmp_path, both).items()}
        return {name: peaks[f"{name} large"] - peaks[f"{name} small"] for name in cases}

    alone = activations(1)
    for kind in BARS:
        shared = activations(2, size=2, kind=kind)
        ratios = {name: shared[name] / alone[name] for name in alone}
        assert max(ratios.values()) <= 0.55, f"{kind}: {ratios}"
