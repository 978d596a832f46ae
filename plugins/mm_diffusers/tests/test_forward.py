"""A forward in bf16, on tensors without numbers, and what it reads of tensors of the device."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from mm_diffusers.families import FAMILIES
from mm_diffusers.testing.parity import OneLevel, Pair, forward_inputs, pair_of
from mm_diffusers.transformer import DiffusersTransformer, unpacked
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from mm_core.contracts import CLIP_CONDITIONS
from mm_core.modules.flops import counted_flops

LENGTHS = [3, 20, 11]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, pipeline_of) -> Pair:
    pictures = {"QwenImageEditPlusPipeline": 2}.get(request.param, 0)
    return pair_of(request.param, pipeline_of(request.param), pictures)


class Stopped(Exception):
    """Ends a pipeline's call."""


def velocity_of_pipeline(pair: Pair, noisy: Tensor, sigma: float) -> Tensor:
    """The velocity that the pipeline's own call predicts, of prompts in the dtype of its latents."""
    pipe, calls = pair.pipe, []
    encode, scheduler = pipe.encode_prompt, pipe.scheduler

    def lowered(value):
        if isinstance(value, (list, tuple)):
            return type(value)(map(lowered, value))
        return value.to(noisy.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def stop(module, args, named):
        calls.append((args, named))
        raise Stopped

    hook = pipe.transformer.register_forward_pre_hook(stop, with_kwargs=True)
    pipe.encode_prompt = lambda *args, **named: lowered(encode(*args, **named))
    pipe.scheduler = OneLevel()
    pipe.scheduler.level = sigma
    if pair.family.areas:
        shown = pipe._encode_vae_image
        pipe._encode_vae_image = lambda image, generator: shown(image.float(), generator).to(image.dtype)
    try:
        for rows, given in pair.calls:
            with pytest.raises(Stopped):
                pair.pictures(noisy[rows], 1, **given)
    finally:
        hook.remove()
        pipe.encode_prompt, pipe.scheduler = encode, scheduler
        vars(pipe).pop("_encode_vae_image", None)
    made = [pipe.transformer(*args, **named)[0] for args, named in calls]
    found = torch.stack(made[0]) if isinstance(made[0], list) else torch.cat(made)
    return unpacked(found, pair.family, noisy.shape).float() * (-1 if pair.family.negated else 1)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # in the library's norms
@torch.no_grad()
def test_in_bf16_the_velocity_is_at_least_as_near_to_fp32_as_the_pipelines_own(pair):
    task, whole = pair.task, pair.pipe.transformer
    low, plain = copy.deepcopy(task.predictor).bfloat16(), copy.deepcopy(whole).bfloat16()
    text, mask, given = pair.encoded()
    for sigma in (0.9987, 0.51225, 0.3333):
        noisy, times = pair.noise(3), torch.full((3,), 1000 * sigma)
        exact = task.predictor(noisy, times, text, mask, **given)
        kept = {*CLIP_CONDITIONS, *(name for name, one in given.items() if not one.is_floating_point())}
        lowered = {name: one if name in kept else one.bfloat16() for name, one in given.items()}
        assert not exact._is_view(), "FSDP2 may drop its hook on a view"
        ours = low(noisy.bfloat16(), times, text.bfloat16(), mask, **lowered).float()
        pair.pipe.transformer = plain  # without what keeps our times exact
        try:
            theirs = velocity_of_pipeline(pair, noisy.bfloat16(), sigma)
        finally:
            pair.pipe.transformer = whole
        errors = [(found - exact).norm() / exact.norm() for found in (ours, theirs)]
        # Rounding elsewhere is as large where the time matters less.
        assert errors[0] <= 1.02 * errors[1] and errors[0] < 0.015, (sigma, errors)


@torch.no_grad()
def test_operations_are_counted_without_numbers_and_leave_the_model_as_it_was(pair):
    predictor = pair.task.predictor
    given = forward_inputs(predictor, LENGTHS)
    with torch.device("meta"):
        pictures = len(predictor._pictures)
        empty = DiffusersTransformer(str(predictor.folder.path), pictures)
    counted = counted_flops(empty, {name: one.to("meta") for name, one in given.items()})
    empty.to_empty(device="cpu").load_state_dict(predictor.state_dict())
    assert torch.equal(empty.eval()(**given), predictor(**given))
    given["text_mask"] = torch.ones_like(given["text_mask"])  # without numbers, all is text
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predictor(**given)
    if counted is None:  # its forward sorts the tokens of text by their mask
        assert pair.kind.startswith("HunyuanVideo15")
    else:
        assert counted.forward == counter.get_total_flops()


class Reads(TorchFunctionMode):
    """Notes the files whose code reads a tensor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        reading = (Tensor.item, Tensor.tolist, Tensor.nonzero, Tensor.__bool__, Tensor.__int__, Tensor.cpu)
        if func in reading or (func is Tensor.__getitem__ and getattr(args[1], "dtype", None) == torch.bool):
            frame = sys._getframe(1)
            while "torch" in frame.f_code.co_filename.split("/"):
                frame = frame.f_back
            self.files.append(frame.f_code.co_filename)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_no_line_of_ours_reads_a_tensor(pair):
    given = forward_inputs(pair.task.predictor, LENGTHS)
    with Reads() as counted:
        pair.task.predictor(**given)
    with Reads() as reads:
        known = pair.task.predictor(**given, text_lengths=LENGTHS)
    assert not [name for name in reads.files if "mm_" in name]
    assert bool([name for name in counted.files if "mm_" in name]) == pair.family.ragged
    assert torch.equal(known, pair.task.predictor(**given))
