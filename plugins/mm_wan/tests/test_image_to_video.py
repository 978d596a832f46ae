"""Image-to-video, first-last-frame, TI2V: what is trained and sampled is what Diffusers computes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import wan_frames as frames
from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from mm_wan.predictor.transformer import WanTransformer
from mm_wan.schedulers.flow_match import WanFlowMatch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from wan_solvers import of_diffusers
from wan_variants import DISTINCT, tiny

import mm_core
from mm_core.cli.main import main
from mm_core.contracts import Randomness, SampleKey, SampleRequest, VideoTextBatch
from mm_core.data.media.images import fit_image, read_image
from mm_core.data.rows.prompts import Prompt
from mm_core.interchange.export import export
from mm_core.plan import build_task, make_plan
from mm_core.testing import PredictorProbe
from mm_core.testing.predictors.capabilities import given_frames
from support.ranks import run_ranks

HERE = Path(__file__).parent


NAMES = {"i2v": ("first",), "i2v_2.2": ("first",), "flf2v": ("first", "last"), "ti2v": ("first",)}
PROMPT, NEGATIVE = "a red circle moves left", "blurred details"
SIZE = {"num_frames": 5, "height": 32, "width": 64}
RNG = Randomness(7)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return frames.maker(tmp_path_factory.mktemp("wan"))


def request(images: list[Path], prompts: tuple[str, ...] = (PROMPT,), **options) -> SampleRequest:
    """All prompts with the same images."""
    read = tuple(read_image(path) for path in images)
    given = {"seed": 3, "steps": 3, "guidance": 5.0, "fps": 8.0, **SIZE, **options}
    return SampleRequest(prompts, NEGATIVE, images=(read,) * len(prompts) if read else (), **given)


def latents_of(task, asked: SampleRequest) -> tuple[Tensor, Tensor]:
    """What the task decodes, and the pixels that come of it."""
    seen = []
    decode = task.autoencoder.decode
    task.autoencoder.decode = lambda latents: (seen.append(latents), decode(latents))[1]
    try:
        pixels = torch.stack([clip.pixels for clip in task.sample(asked)])
    finally:
        del task.autoencoder.decode
    return torch.cat(seen), pixels


def piped(pipeline, images: list[Path], solver: str, guidance: float, output: str = "latent") -> Tensor:
    """The same by Diffusers' pipeline."""
    pipeline.scheduler = of_diffusers(solver)
    pipeline.set_progress_bar_config(disable=True)
    channels, stride = pipeline.vae.config.z_dim, pipeline.vae.config.scale_factor_spatial
    noise = Randomness(3).normal((channels, 2, 32 // stride, 64 // stride), "sample", 0)[None]
    opened = [Image.open(path).convert("RGB") for path in images]
    given = dict(zip(("image", "last_image"), opened, strict=False))
    return pipeline(
        prompt=PROMPT, negative_prompt=NEGATIVE, **given, **SIZE, num_inference_steps=3,
        guidance_scale=guidance, latents=noise, output_type=output,
    ).frames  # fmt: skip


# -- sampling --------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("solver", ["unipc", "euler", "dpm++"])
@pytest.mark.parametrize("variant", NAMES)
def test_clips_are_those_of_the_pipeline(made, variant, solver, guidance):
    at = made(variant)
    images = at.images[: len(NAMES[variant])]
    at.task.scheduler = WanFlowMatch(solver=solver)
    latents, pixels = latents_of(at.task, request(images, guidance=guidance))
    pipeline = WanImageToVideoPipeline.from_pretrained(at.folder)
    expected = piped(pipeline, images, solver, guidance)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-4)
    shown = piped(pipeline, images, solver, guidance, "pt").permute(0, 2, 1, 3, 4) * 2 - 1
    torch.testing.assert_close(pixels, shown, rtol=0, atol=1e-4)
    assert pixels.std() > 0.1 and latents.std() > 0.3


@pytest.mark.parametrize("variant", NAMES)
def test_every_image_and_guidance_count(made, variant):
    """What the comparison above would not see if the tiny models were deaf to them."""
    at = made(variant)
    images, other = at.images[: len(NAMES[variant])], at.images[2]
    base, _ = latents_of(at.task, request(images))
    for place in range(len(images)):
        changed, _ = latents_of(at.task, request([*images[:place], other, *images[place + 1 :]]))
        assert (changed - base).abs()[:, :, 1:].max() > 1e-2
    unguided, _ = latents_of(at.task, request(images, guidance=1.0))
    assert (unguided - base).abs()[:, :, 1:].max() > 1e-2


def test_wan_2_2_takes_a_last_frame_too(made):
    at = made("i2v_2.2")
    latents, _ = latents_of(at.task, request(at.images[:2]))
    pipeline = WanImageToVideoPipeline.from_pretrained(at.folder)
    torch.testing.assert_close(latents, piped(pipeline, at.images[:2], "unipc", 5.0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_ti2v_makes_clips_from_text_alone(made, guidance):
    at = made("ti2v")
    latents, _ = latents_of(at.task, request([], guidance=guidance))
    expected = piped(WanPipeline.from_pretrained(at.folder), [], "unipc", guidance)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-4)


def test_the_given_frame_of_ti2v_is_in_the_clip(made):
    at = made("ti2v")
    latents, _ = latents_of(at.task, request(at.images[:1]))
    frame = fit_image(read_image(at.images[0]), 32, 64)[None, :, None]
    assert torch.equal(latents[:, :, :1], at.task.autoencoder.encode(frame).mode())


@pytest.mark.parametrize("variant", NAMES)
def test_a_batch_of_three_is_three_clips(made, variant):
    at = made(variant)
    rows = [tuple(read_image(p) for p in (at.images * 2)[i : i + len(NAMES[variant])]) for i in range(3)]
    prompts = (PROMPT, "two boats", "")
    base = request(at.images[:1])
    together, _ = latents_of(at.task, replace(base, prompts=prompts, images=tuple(rows)))
    for i in range(3):
        alone, _ = latents_of(at.task, replace(base, prompts=prompts[i : i + 1], images=(rows[i],), first=i))
        assert (alone[0] - together[i]).abs().max() < 1e-5 * together[i].abs().max()
    assert (together[0] - together[1]).abs().max() > 0.1


# -- training --------------------------------------------------------------------------------------


def clips_of(count: int) -> Tensor:
    """pixels[B,3,F,Y,X] of levels that 8 bits hold, as decoded clips have."""
    coarse = RNG.normal((count, 3, 3, 3, 5), "clips")
    smooth = torch.nn.functional.interpolate(coarse, (5, 32, 64), mode="trilinear", align_corners=True)
    return (smooth.tanh() * 127.5 + 127.5).round() / 127.5 - 1


def batch_of(pixels: Tensor, first: int = 0) -> VideoTextBatch:
    captions = [PROMPT, "two boats", ""][first : first + len(pixels)]
    keys = [SampleKey(0, first + row) for row in range(len(pixels))]
    return VideoTextBatch(keys, torch.ones(len(pixels)), list(captions), pixels=pixels, captions=captions)


@torch.no_grad()
def piped_error(folder: Path, names, pixels: Tensor, caption: str, noise: Tensor, timestep: Tensor) -> Tensor:
    """The mean squared error of one clip, from the pipeline's own parts: how it prepares the given frames,
    and how its loop calls the transformer."""
    pipe = WanImageToVideoPipeline.from_pretrained(folder)
    numbers = (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    mean, std = (torch.tensor(listed).view(1, -1, 1, 1, 1) for listed in numbers)
    clean = (pipe.vae.encode(pixels).latent_dist.mode() - mean) / std
    sigma = timestep / 1000
    noisy, target = (1 - sigma) * clean + sigma * noise, noise - clean
    first, last = pixels[:, :, 0], pixels[:, :, -1] if "last" in names else None
    parts = pipe.prepare_latents(
        first, 1, clean.shape[1], 32, 64, 5, torch.float32, torch.device("cpu"), None, noisy, last
    )
    text, _ = pipe.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=512)
    embeds = None
    if pipe.transformer.config.image_dim is not None:
        shown = [first] if last is None else [first, last]
        images = [((f[0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy() for f in shown]
        embeds = pipe.encode_image([Image.fromarray(image) for image in images])
    model: WanTransformer3DModel = pipe.transformer
    if not pipe.config.expand_timesteps:
        given = torch.cat(parts, dim=1)
        predicted = model(given, timestep[None], text, embeds, return_dict=False)[0]
        return (predicted - target).square().mean()
    _, condition, mask = parts
    tokens = (mask[0][0][:, ::2, ::2] * timestep).flatten()[None]
    predicted = model((1 - mask) * condition + mask * noisy, tokens, text, return_dict=False)[0]
    return (predicted - target)[:, :, 1:].square().mean()


@pytest.mark.parametrize("variant", NAMES)
def test_the_loss_is_that_of_the_pipelines_parts(made, variant):
    at = made(variant)
    pixels = clips_of(2)
    batch = batch_of(pixels)
    loss = at.task.loss(at.task.prepare(batch, RNG)).total.detach()
    expected = 0.0
    for row, key in enumerate(batch.keys):
        timestep = at.task.scheduler.sample_timesteps([RNG.generator("timestep", *key)])
        noise = RNG.normal(latent_size(at), "noise", *key)[None]
        error = piped_error(
            at.folder, NAMES[variant], pixels[row : row + 1], batch.captions[row], noise, timestep[0]
        )
        expected += float(error * at.task.scheduler.loss_weight(timestep))
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("variant", NAMES)
def test_so_is_the_held_out_loss(made, variant):
    at = made(variant)
    pixels = clips_of(1)
    found = at.task.evaluate(batch_of(pixels), RNG, [0.3, 0.6])
    noise = RNG.normal(latent_size(at), "validation noise", 0)[None]
    for quantile in (0.3, 0.6):
        timestep = at.task.scheduler.timestep_quantile(torch.tensor([quantile]))
        error = piped_error(at.folder, NAMES[variant], pixels, PROMPT, noise, timestep[0])
        expected = float(error * at.task.scheduler.loss_weight(timestep))
        assert float(found.sums[f"loss_at/{quantile:g}"]) == pytest.approx(expected, rel=1e-5)
    known = found.outputs["estimate"][:, :, 0].equal(found.outputs["clean"][:, :, 0])
    assert known == (variant == "ti2v")


def latent_size(at: SimpleNamespace) -> tuple[int, ...]:
    return at.task.autoencoder.latent_shape(**SIZE)


@pytest.mark.parametrize("variant", NAMES)
def test_each_sample_of_a_batch_is_trained_as_if_alone(made, variant):
    at = made(variant)
    pixels = clips_of(3)
    together = at.task.loss(at.task.prepare(batch_of(pixels), RNG))
    alone = [at.task.loss(at.task.prepare(batch_of(pixels[i : i + 1], i), RNG)) for i in range(3)]
    totals = torch.stack([one.total for one in alone]).detach()
    assert float(together.total.detach()) == pytest.approx(float(totals.sum()), rel=1e-5)
    assert together.weight == 3 and together.tokens == sum(one.tokens for one in alone)


@pytest.mark.parametrize("variant", NAMES)
def test_the_plan_and_the_loss_report_the_operations_that_torch_counts(made, variant):
    at = made(variant)
    inputs = at.task.prepare(batch_of(clips_of(1)), RNG)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = at.task.loss(inputs)
        loss.total.backward()
    plan = make_plan(at.config, 1)
    assert plan.flops.useful == loss.flops == counter.get_total_flops()


def test_what_ti2v_predicts_of_the_given_frame_counts_for_nothing(made):
    at = made("ti2v")
    inputs = at.task.prepare(batch_of(clips_of(2)), RNG)
    given, other = inputs.given.timestep.chunk(2, dim=1)
    assert (given == 0).all() and (other > 0).all()
    before = at.task.loss(inputs).total
    inputs.target[:, :, 0] = float("nan")
    assert torch.equal(at.task.loss(inputs).total, before)
    inputs.target[:, :, 1] += 1
    assert (at.task.loss(inputs).total - before).abs() > 0.1


def test_frames_of_a_config_decide_what_is_shown(made):
    at = made("ti2v")
    assert at.task.frames == ("first",)
    text_only = build_task(frames.replace_task(at.config, frames=()))
    assert text_only.frames == ()
    at.task.frames = ()
    try:
        inputs = at.task.prepare(batch_of(clips_of(1)), RNG)
    finally:
        at.task.frames = ("first",)
    assert inputs.given.timestep.dim() == 1 and inputs.given.counts is None


# -- in and out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", NAMES)
def test_what_goes_in_comes_out_and_the_pipeline_loads_it(made, variant, tmp_path):
    at = made(variant)
    out = export(f"{at.run}@0", tmp_path / "out", "wan/diffusers")
    assert {path.name for path in out.iterdir()} == {p.name for p in at.folder.iterdir()} | {"README.md"}
    before, after = (load_file(folder / frames.FILE) for folder in (at.folder, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    images = at.images[: len(NAMES[variant])]
    clips = [
        piped(WanImageToVideoPipeline.from_pretrained(folder), images, "unipc", 5.0)
        for folder in (at.folder, out)
    ]
    # Not bit for bit: where a file's tensors come to lie in memory changes the order of sums.
    torch.testing.assert_close(*clips, rtol=0, atol=1e-5)


def test_the_command_takes_images_from_options_and_from_rows(made, tmp_path, capsys):
    at = made("i2v")
    rows = [{"prompt": PROMPT, "image": "0.png"}, {"prompt": "two boats", "image": "1.png"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for path in at.images:
        shutil.copy(path, tmp_path)
    same = ["sample", "--run", str(at.run), "--steps", "2", "--seed", "3"]
    assert main([*same, "--prompts", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "rows")]) == 0
    options = [f"--image={path}" for path in at.images[:2]]
    prompts = ["--prompt", PROMPT, "--prompt", "two boats"]
    assert main([*same, *prompts, *options, "--out", str(tmp_path / "options")]) == 0
    names = sorted(path.name for path in (tmp_path / "rows").glob("*.mp4"))
    assert names == ["000-a-red-circle-moves-left.mp4", "001-two-boats.mp4"]
    for name in names:
        assert (tmp_path / "rows" / name).read_bytes() == (tmp_path / "options" / name).read_bytes()
    # One image serves all that have none of their own.
    assert main([*same, *prompts, options[0], "--out", str(tmp_path / "one")]) == 0
    one, two = ((tmp_path / folder / names[1]).read_bytes() for folder in ("one", "options"))
    assert (tmp_path / "one" / names[0]).read_bytes() == (tmp_path / "rows" / names[0]).read_bytes()
    assert one != two
    capsys.readouterr()


def test_from_python(made):
    at = made("flf2v")
    first, last = at.images[:2]
    options = {"negative_prompt": NEGATIVE, "steps": 3, "guidance": 5.0, "seed": 3}
    (clip,) = mm_core.sample(at.run, PROMPT, images=[first], last_images=[last], **options)
    (other,) = mm_core.sample(at.run, prompts=[Prompt(PROMPT, first, last)], **options)
    assert torch.equal(clip.pixels, other.pixels)
    (expected,) = piped(WanImageToVideoPipeline.from_pretrained(at.folder), [first, last], "unipc", 5.0, "pt")
    torch.testing.assert_close(clip.pixels, expected.transpose(0, 1) * 2 - 1, rtol=0, atol=1e-4)


# -- over ranks ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["i2v", "flf2v", "ti2v", "i2v_high_low"])
def test_two_ranks_train_the_weights_of_one(tmp_path, variant):
    seen, folder = {}, frames.checkpoint_at(tmp_path / variant, variant)
    for world in (1, 2):
        out = tmp_path / f"{world}.pt"
        run_ranks(HERE / "frames_ranks.py", world, out, folder, variant)
        seen[world] = torch.load(out)
    assert seen[2]["losses"] == pytest.approx(seen[1]["losses"], rel=1e-5)
    for part in ("gradients", "trained"):
        for name, one in seen[1][part].items():
            gap = (seen[2][part][name] - one).abs().max() / one.abs().max().clamp_min(1e-8)
            assert gap < 1e-6, (part, name, float(gap))
    moved = [n for n, t in seen[2]["trained"].items() if not torch.equal(t, seen[2]["begun"][n])]
    experts = {"predictor" + (f".{name}." if name else "") for name in seen[2]["experts"]}
    assert moved == [name for name in seen[2]["begun"] if name.startswith(tuple(experts))]
    assert len(experts) == (2 if variant == "i2v_high_low" else 1)


@pytest.mark.parametrize("variant", [name for name in DISTINCT if name != "wan2.1-t2v-1.3b"])
def test_given_frames_keep_the_contract(variant):
    # Nothing but the channels of its latents identifies TI2V.
    channels = {"in_channels": 48, "out_channels": 48} if variant == "wan2.2-ti2v-5b" else {}
    given_frames(PredictorProbe(lambda: WanTransformer(**tiny(variant, **channels))))
