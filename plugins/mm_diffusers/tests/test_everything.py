"""What the platform has for Wan, it has for pipelines: each way to train takes the steps of a plain run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml
from mm_diffusers.families import FAMILIES

from mm_core.device.torch_private import shards_mixed
from support.logs import log_of

pytestmark = pytest.mark.slow

_spec = spec_from_file_location("diffusers_runs", Path(__file__).with_name("test_runs.py"))
assert _spec is not None and _spec.loader is not None  # by its path: other plugins have a test_runs too
_runs = module_from_spec(_spec)
_spec.loader.exec_module(_runs)
LORA, mm, trained = _runs.LORA, _runs.mm, _runs.trained
photos, clips, edits, run = _runs.photos, _runs.clips, _runs.edits, _runs.run  # fixtures

BLOCKS = "engine.recompute_modules=auto"
TWO = ("--nproc", 2)
LOW = ("engine.param_dtype=bf16", LORA)
STREAM = ("engine.base={stream: true, keep: 1}", BLOCKS)
representative = pytest.mark.parametrize("run", ["QwenImagePipeline"], indirect=True)


def family_of(run: Path):
    return FAMILIES[Path(yaml.safe_load(run.read_text())["task"]["pipeline"]).name]


def check_engines(run: Path, stages: Sequence[int] = (2, 3)) -> None:
    """DeepSpeed, recomputed blocks, whole or selective, and ranks that share samples."""
    plain = trained(run, "plain")
    assert log_of(run.parent / "plain")[-1]["model_flops_per_second"] > 0
    for name, recompute in (("whole", "full"), ("selective", "selective")):
        assert trained(run, name, BLOCKS, f"engine.recompute={recompute}") == plain
    for stage in stages:
        engine = f"engine={{type: deepspeed, settings: {{zero_optimization: {{stage: {stage}}}}}}}"
        found = trained(run, f"stage_{stage}", *TWO, "train.micro_batch_size=1", engine)
        assert found == pytest.approx(plain, rel=1e-6)
    shared = ("engine.context_parallel={size: 2}", BLOCKS)
    if family_of(run).text_tokens is not None:
        assert trained(run, "shared", *TWO, *shared) == pytest.approx(plain, rel=1e-6)
    else:
        with pytest.raises(AssertionError, match="no trained component declares where its tokens are"):
            trained(run, "shared", *TWO, *shared)


def check_adapters(run: Path, kinds: Sequence[str], bases: Sequence[str]) -> None:
    """Each kind starts at the plain run's first loss; the base is in 16, 8 or 4 bits, and streamed."""
    plain = trained(run, "lora", LORA)
    assert trained(run, "streamed", LORA, *STREAM) == plain
    for number, kind in enumerate(kinds):
        found = trained(run, f"kind_{number}", LORA.replace("rank: 4", f"rank: 4, {kind}"))
        assert found[0] == plain[0] and found[1:] != plain[1:]
    if not shards_mixed():
        return
    wide = trained(run, "wide", *LOW, "train.base_dtype=bf16")
    assert wide == pytest.approx(plain, rel=2e-2) and wide != plain
    for base in bases:
        found = trained(run, base, *LOW, f"train.base_dtype={base}")
        assert found == pytest.approx(wide, rel=2e-2) and found != wide
    low = (*LOW, f"train.base_dtype={base}")
    assert trained(run, "low_streamed", *low, *STREAM) == found
    assert trained(run, "low_two", *low, "train.micro_batch_size=1", *TWO) == pytest.approx(found, rel=1e-5)


def check_runs(run: Path) -> None:
    """A cache, with which encoders are not loaded; the average; a resume; the plan."""
    cache = f"data.cache.dir={run.parent / 'cache'}"
    mm("cache", "build", "--config", run, cache)
    low = ("engine.param_dtype=bf16", "ema={decay: 0.9}", cache)
    mm("train", "--config", run, "--verify-resume", 2, *low, "run.name=again")
    plan = mm("train", "--config", run, "--dry-run", cache, BLOCKS)
    assert "not loaded: autoencoder, text_encoder" in plan
    # HunyuanVideo's forward sorts the tokens of text by their mask.
    assert ("FLOPs per step, all ranks" in plan) == ("HunyuanVideo15" not in run.parent.name)


@representative
def test_engines_take_the_steps_of_a_plain_run(run):
    check_engines(run, stages=(3,))


def test_all_engines_take_the_steps_of_a_plain_run_in_each_family(run):
    check_engines(run)


@representative
def test_adapters_train_on_a_base_of_16_and_4_bits(run):
    check_adapters(run, ["dora: true"], ["nf4"])


def test_adapters_of_each_kind_train_on_a_base_of_each_kind_in_each_family(run):
    check_adapters(run, ["dora: true", "kind: lokr", "kind: loha"], ["int8", "fp8", "nf4"])


@representative
def test_a_cached_run_in_bf16_with_an_average_resumes_to_the_bit(run):
    check_runs(run)


def test_a_cached_run_in_bf16_with_an_average_resumes_to_the_bit_in_each_family(run):
    check_runs(run)


def test_compiled_blocks_take_the_steps_of_a_plain_run(run):
    assert trained(run, "compiled", "engine.compile={modules: auto}") == pytest.approx(
        trained(run, "plain"), rel=1e-5
    )


@representative
def test_a_plan_of_ranks_that_share_samples_has_their_memory_and_refuses_the_ring(run):
    text = run.read_text().replace("max_", "").replace("mode: variable", "mode: sampler")
    one_size = run.with_name("one_size.yaml")
    one_size.write_text(text, encoding="utf-8")
    given = ("train", "--config", one_size, "--nproc", 2, "--dry-run")
    shown = mm(*given, "engine.context_parallel={size: 2}")
    assert "FLOPs per step" in shown and "activations of predictor" in shown
    refused = mm(*given, "engine.context_parallel={size: 2, kind: ring}", code=1)
    assert "predictor uses masks in its attention, which ring attention does not have" in refused
