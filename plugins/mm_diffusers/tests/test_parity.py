"""Pictures, velocity, loss and gradients are those of the pipelines themselves, called with prompts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from mm_diffusers.families import FAMILIES, Encoded, Family
from mm_diffusers.schedule import PipelineSchedule
from mm_diffusers.testing import tiny_pipeline
from mm_diffusers.testing.parity import CAPTIONS, RNG, Pair, batch_of, check_family, pair_of
from PIL import Image

from mm_core.contracts import Ragged
from mm_core.errors import MMError


@pytest.fixture(scope="module", params=[kind for kind in FAMILIES if hasattr(diffusers, kind)])
def pair(request, pipeline_of) -> Pair:
    pictures = {"QwenImageEditPlusPipeline": 2}.get(request.param, 0)
    return pair_of(request.param, pipeline_of(request.param), pictures)


@pytest.mark.parametrize("scale", [None, 3.5])
def test_five_steps_make_the_pipelines_pictures(pair, scale):
    found = pair.sampled(5, scale)
    wanted = pair.pictures(pair.noise(3), 5, scale)
    assert (found - wanted).abs().max() < 1e-5
    assert wanted.std() > 0.01 and (wanted[0] - wanted[2]).abs().max() > 1e-4  # captions matter


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).norm() <= 1e-6 * wanted.norm())


def test_velocity_loss_and_gradients_are_those_of_the_pipelines_call(pair):
    """The formula of Diffusers' training examples: the squared error of eps - x_0, mean over all."""
    task, sigma = pair.task, 0.4
    clean, noise = pair.noise(3) * 0.7, pair.noise(6)[3:]
    noisy = (1 - sigma) * clean + sigma * noise
    found, wanted = pair.velocities(noisy, sigma)
    assert close(found, wanted)
    losses = [(each - (noise - clean)).square().mean() for each in (found, wanted)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for loss, model in zip(losses, (task.predictor.transformer, pair.pipe.transformer), strict=True):
        model.zero_grad()
        loss.backward()
    theirs = {n: p.grad for n, p in pair.pipe.transformer.named_parameters() if p.grad is not None}
    own = {n: p.grad for n, p in task.predictor.transformer.named_parameters() if p.grad is not None}
    assert own.keys() == theirs.keys() and len(own) > 20
    norm = torch.stack([each.norm() for each in theirs.values()]).norm()
    assert all((own[name] - theirs[name]).norm() <= 1e-6 * norm for name in own)


def test_a_training_step_is_the_formula_on_the_pipelines_latents(pair):
    """The task's own loss, from pixels: latents as the pipeline decodes them, levels that are not shifted."""
    pixels = torch.rand(3, 3, pair.frames, 64, 96, generator=torch.Generator().manual_seed(1)) * 2 - 1
    task = pair.task
    fields = {"references": Ragged.of_pictures(pair.references)} if pair.family.areas else {}
    inputs = task.prepare(batch_of(pixels, CAPTIONS, **fields), RNG)
    sigma = inputs.sigma.view(-1, 1, 1, 1, 1)
    clean = task.autoencoder.encode(pixels).mode()
    noise = torch.stack([RNG.normal(clean.shape[1:], "noise", 0, row) for row in range(3)])
    assert torch.allclose(inputs.given.latents, (1 - sigma) * clean + sigma * noise, atol=1e-6)
    assert torch.allclose(inputs.target, noise - clean, atol=1e-6)
    predicted = task.predict(inputs.given, inputs.text, inputs.text_mask, None)
    loss = task.loss(inputs)
    assert loss.total.item() == pytest.approx(
        3 * (predicted - inputs.target).square().mean().item(), rel=1e-5
    )
    again = task.autoencoder.decode(clean)
    own = pair.pipe.vae
    clips = pair.frames > 1 or own.config.get("z_dim")
    with torch.no_grad():
        encoded = own.encode(pixels if clips else pixels[:, :, 0]).latent_dist.mode()
        shown = own.decode(encoded).sample.clamp(-1, 1)
    assert (again.flatten(2) - shown.flatten(2)).abs().max() < 1e-4  # out of unit scale and back


def test_levels_of_training_are_known_while_a_task_is_built_on_meta(pipeline_of):
    """Medians as the pipelines sample: a shift of 3, and exp(1.15) for FLUX.1's 4096 tokens."""
    for kind, median in {"ZImagePipeline": 750.0, "FluxPipeline": 759.5}.items():
        folder = str(pipeline_of(kind))
        with torch.device("meta"):
            schedule = PipelineSchedule(folder, shift="sampling")
            found = schedule.timestep_quantile(torch.tensor([0.5], device="cpu"))
        assert found.item() == pytest.approx(median, abs=0.1)


def test_a_stable_diffusion_without_t5_makes_its_pipelines_pictures(tmp_path):
    folder = tiny_pipeline(tmp_path / "sd3", "StableDiffusion3Pipeline")
    diffusers.StableDiffusion3Pipeline.from_pretrained(
        folder, text_encoder_3=None, tokenizer_3=None
    ).save_pretrained(tmp_path / "small")
    pair = pair_of("StableDiffusion3Pipeline", tmp_path / "small")
    assert pair.task.text_encoder.encoders == ["text_encoder", "text_encoder_2"]
    assert (pair.sampled(5, 3.5) - pair.pictures(pair.noise(3), 5, 3.5)).abs().max() < 1e-5


def test_a_distilled_klein_is_not_guided(pipeline_of, tmp_path):
    folder = shutil.copytree(pipeline_of("Flux2KleinPipeline"), tmp_path / "klein")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "is_distilled": True}))
    pair = pair_of("Flux2KleinPipeline", folder)
    assert (pair.sampled(5, 3.5) - pair.pictures(pair.noise(3), 5, 3.5)).abs().max() < 1e-5


def test_kontext_takes_a_reference_picture_as_its_pipeline_does(pipeline_of):
    pair = pair_of("FluxKontextPipeline", pipeline_of("FluxKontextPipeline"), references=1)
    draws = np.random.default_rng(0)
    shown = Image.fromarray(draws.integers(0, 255, (80, 64, 3), dtype=np.uint8))
    given = torch.from_numpy(np.array(shown)).permute(2, 0, 1)
    found = pair.sampled(5, 1.0, references=((given,), (), (given,)))
    noise, wanted = pair.noise(3), []
    for row, image in enumerate((shown, None, shown)):
        wanted.append(pair.pictures(noise[row : row + 1], 5, prompt=CAPTIONS[row : row + 1], image=image))
    assert (found - torch.cat(wanted)).abs().max() < 1e-5


def test_klein_takes_reference_pictures_as_its_pipeline_does(pipeline_of):
    pair = pair_of("Flux2KleinPipeline", pipeline_of("Flux2KleinPipeline"), references=3)
    draws = np.random.default_rng(0)
    shown = [
        Image.fromarray(draws.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in ((80, 64), (64, 96))
    ]
    given = tuple(torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in shown)
    rows = [(), given[:1], given]
    found = pair.sampled(5, 1.0, references=tuple(rows))
    wanted = torch.cat(
        [
            pair.pictures(pair.noise(3)[row : row + 1], 5, prompt=[caption], image=shown[: len(own)] or None)
            for row, (caption, own) in enumerate(zip(CAPTIONS, rows, strict=True))
        ]
    )
    assert (found - wanted).abs().max() < 1e-5
    without = pair.sampled(5, 1.0)
    assert (found[0] - without[0]).abs().max() < 1e-5 and (found[2] - without[2]).abs().max() > 1e-3


def test_each_row_with_references_trains_as_alone(pipeline_of):
    pair = pair_of("Flux2KleinPipeline", pipeline_of("Flux2KleinPipeline"), references=2)
    pixels = torch.rand(2, 3, 1, 64, 96, generator=torch.Generator().manual_seed(1)) * 2 - 1
    shown = [[torch.rand(3, 40, 70) * 2 - 1], [torch.rand(3, 32, 32) * 2 - 1] * 2]
    both = pair.task.loss(
        pair.task.prepare(batch_of(pixels, CAPTIONS[:2], references=Ragged.of_pictures(shown)), RNG)
    )
    alone = 0.0
    for row in range(2):
        batch = batch_of(
            pixels[row : row + 1],
            CAPTIONS[row : row + 1],
            references=Ragged.of_pictures(shown[row : row + 1]),
        )
        batch.keys = [type(batch.keys[0])(0, row)]
        alone += pair.task.loss(pair.task.prepare(batch, RNG)).total.item()
    assert both.total.item() == pytest.approx(alone, rel=1e-5)


def test_a_recipe_that_does_not_hold_is_found_by_its_part(pipeline_of):
    folder, family = pipeline_of("ZImagePipeline"), FAMILIES["ZImagePipeline"]
    with pytest.raises(MMError, match=r"pictures: [0-9.]+e.00 from what ZImagePipeline makes\n.*\n.*negated"):
        check_family(folder, replace(family, negated=False))
    with pytest.raises(MMError, match=r"guided: .*\n.*\n.*guidance and off"):
        check_family(folder, replace(family, guidance="usual"))
    with pytest.raises(MMError, match=r"takes 2 channels, but latents have 4\n.*channels and folded"):
        check_family(folder, replace(family, channels=2))
    with pytest.raises(MMError, match=r"velocity: .*unexpected keyword argument 'embeds'\n.*encoded"):
        check_family(folder, replace(family, encoded=(Encoded("embeds", "cap_feat_dim"),)))
    with pytest.raises(MMError, match=r"no number 'cap_dim'.*\n *accepted: .*cap_feat_dim"):
        check_family(folder, replace(family, encoded=(Encoded("prompt_embeds", "cap_dim"),)))


def test_a_word_that_a_recipe_does_not_know_is_refused_where_it_is_written():
    mask = Encoded("mask", kind="mask")
    with pytest.raises(MMError, match=r"guidance of a recipe is 'add'\n.*usual, added, rescaled"):
        Family((Encoded("prompt_embeds", "dim"), mask), guidance="add")
    with pytest.raises(MMError, match=r"latents of a recipe is 'token'"):
        Family((Encoded("prompt_embeds", "dim"), mask), latents="token")
    with pytest.raises(MMError, match=r"kind of a recipe is 'masks'"):
        Encoded("mask", kind="masks")
    with pytest.raises(MMError, match=r'names no width\n.*\n.*Encoded\(\'mask\', kind="mask"\)'):
        Encoded("mask")
