"""`wan/vae`: equal to Diffusers' AutoencoderKLWan and to what its pipelines do with latents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from mm_wan.encoders.config import TilingParam
from mm_wan.encoders.vae import WanVAE
from mm_wan.testing import make_tiny_checkpoint
from safetensors.torch import load_file, save_file

import mm_core
from mm_core.config.load import load_config
from mm_core.contracts import Autoencoder
from mm_core.errors import CheckpointError, ContractError
from mm_core.plan import build_task
from support.scripts import script

CPU = torch.device("cpu")
benchmark = script("benchmarks/wan_vae_memory.py")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Pipelines with an autoencoder of 16 and of 48 channels."""
    return {
        variant: make_tiny_checkpoint(tmp_path_factory.mktemp(variant), variant)
        for variant in ("t2v", "ti2v")
    }


@pytest.fixture(params=["t2v", "ti2v"])
def checkpoint(request, checkpoints) -> Path:
    return checkpoints[request.param]


@pytest.fixture
def copied(checkpoints, tmp_path) -> Path:
    """An autoencoder's folder that a test may damage."""
    return Path(shutil.copytree(checkpoints["t2v"] / "vae", tmp_path / "vae"))


def loaded(folder: Path, **options) -> WanVAE:
    vae = WanVAE(str(folder), **options)
    mm_core.load_frozen(vae, CPU)
    return vae


def diffusers_vae(folder: Path) -> AutoencoderKLWan:
    return AutoencoderKLWan.from_pretrained(folder / "vae").eval()


def clips(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(7 + i) for i in range(count)]


# -- golden --------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 5, 13])
@pytest.mark.parametrize("slicing", [False, True])
def test_moments_are_bit_equal_to_diffusers(checkpoint, frames, slicing):
    pixels = clips(2, 3, frames, 32, 48)
    theirs = diffusers_vae(checkpoint)
    theirs.use_slicing = slicing
    expected = theirs.encode(pixels).latent_dist.parameters
    assert torch.equal(loaded(checkpoint, slicing=slicing).encode(pixels).moments, expected)


@torch.no_grad()
def test_latents_are_normalised_as_the_pipelines_do(checkpoint):
    """WanImageToVideoPipeline.prepare_latents: (x - mean) * (1 / std)."""
    pixels, theirs = clips(2, 3, 5, 32, 32), diffusers_vae(checkpoint)
    mean = torch.tensor(theirs.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(theirs.config.latents_std).view(1, -1, 1, 1, 1)
    posterior = loaded(checkpoint).encode(pixels)
    expected = theirs.encode(pixels).latent_dist
    assert torch.equal(posterior.mode(), (expected.mode() - mean) * (1.0 / std))
    sampled = expected.sample(generators(2))
    assert torch.equal(posterior.sample(generators(2)), (sampled - mean) * (1.0 / std))
    torch.testing.assert_close(posterior.mode(), (expected.mode() - mean) / std)


@torch.no_grad()
def test_decoding_is_bit_equal_to_the_pipelines(checkpoint):
    pipeline = WanPipeline.from_pretrained(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    asked = {"prompt": "a red circle moves left", "height": 32, "width": 32, "num_frames": 5,
             "num_inference_steps": 1, "guidance_scale": 1.0}  # fmt: skip
    latents = pipeline(**asked, generator=generators(1)[0], output_type="latent").frames
    expected = pipeline(**asked, generator=generators(1)[0], output_type="pt").frames
    pixels = loaded(checkpoint).decode(latents)
    assert torch.equal((pixels * 0.5 + 0.5).clamp(0, 1).transpose(1, 2), expected)


@torch.no_grad()
def test_tiles_are_diffusers_own(checkpoint):
    tile = TilingParam(64, 64, 48, 48)
    theirs = diffusers_vae(checkpoint)
    theirs.enable_tiling(64, 64, 48, 48)
    pixels = clips(1, 3, 5, 192, 160)
    ours = loaded(checkpoint, tiling=True, tiling_param=tile, norm_latents=False)
    expected = theirs.encode(pixels).latent_dist
    assert torch.equal(ours.encode(pixels).moments, expected.parameters)
    assert not torch.equal(loaded(checkpoint).encode(pixels).moments, expected.parameters)
    assert torch.equal(ours.decode(expected.mode()), theirs.decode(expected.mode()).sample)


@torch.no_grad()
def test_in_bf16_the_layers_are_diffusers_in_bf16(checkpoint):
    theirs = AutoencoderKLWan.from_pretrained(checkpoint / "vae", torch_dtype=torch.bfloat16).eval()
    pixels = clips(1, 3, 9, 32, 32)
    posterior = loaded(checkpoint, dtype="bf16").encode(pixels)
    assert torch.equal(posterior.moments, theirs.encode(pixels.bfloat16()).latent_dist.parameters)
    assert posterior.mode().dtype == torch.float32


# -- options and the contract ----------------------------------------------------------------------


def test_a_config_names_it_by_both_ids(checkpoint):
    for name in ("wan/vae", "wan_video_vae"):
        tiles = {"tile_sample_min_height": 128, "tile_sample_stride_height": 96}
        options = {"from_pretrained": str(checkpoint), "tiling": True, "tiling_param": tiles}
        built = mm_core.build("autoencoder", {"type": name, **options})
        assert isinstance(built, Autoencoder)
        assert built.tiling == TilingParam(128, 256, 96, 192)


@torch.no_grad()
def test_each_row_has_its_own_generator(checkpoints):
    vae, pixels = loaded(checkpoints["t2v"]), clips(3, 3, 5, 16, 16)
    together = vae.encode(pixels).sample(generators(3))
    alone = vae.encode(pixels[2:]).sample(generators(3)[2:])
    torch.testing.assert_close(together[2:], alone, rtol=0, atol=1e-5)
    with pytest.raises(
        ContractError, match=r"number of generators \(2\) differs from the number of clips \(3\)"
    ):
        vae.encode(pixels).sample(generators(2))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "mode"),
        (["task.autoencoder.do_sample=true"], "sample"),
        (["task.autoencoder.do_sample=false"], "mode"),
        (["task.latents=sample"], "sample"),
        (["task.latents=sample", "task.autoencoder.do_sample=true"], "sample"),
    ],
)
def test_do_sample_determines_which_latents_a_run_trains_on(options, expected):
    """Drawn as in the tests of text_to_video: by generators of (seed, sample)."""
    path = Path(__file__).parents[1] / "mm_wan/configs/t2v_1_3b.yaml"
    assert build_task(load_config(path, options)).latents == expected


def test_kept_moments_give_the_same_latents(checkpoints):
    vae = loaded(checkpoints["t2v"])
    posterior = vae.encode(clips(1, 3, 5, 16, 16))
    again = WanVAE(str(checkpoints["t2v"])).posterior(posterior.moments.clone())  # without its weights
    assert torch.equal(again.sample(generators(1)), posterior.sample(generators(1)))


def test_norm_modes(checkpoints):
    pixels = clips(1, 3, 5, 16, 16)
    raw = loaded(checkpoints["t2v"], norm_latents=False).encode(pixels).mode()
    scalar = loaded(checkpoints["t2v"], norm_mode="value_shift_scale", shift_factor=0.5, scaling_factor=2.0)
    assert torch.equal(scalar.encode(pixels).mode(), (raw - 0.5) * 2.0)
    torch.testing.assert_close(scalar.decode((raw - 0.5) * 2.0), scalar.model.decode(raw).sample)
    with pytest.raises(ContractError, match="value_shift_scale needs a scaling_factor"):
        WanVAE("x", norm_mode="value_shift_scale")
    with pytest.raises(ContractError, match="are not used by norm_mode channel_specified_shift_scale"):
        WanVAE("x", scaling_factor=2.0)


def test_shapes_are_those_of_the_latents(checkpoint):
    vae = loaded(checkpoint)
    config = vae.model.config
    assert vae.stride == (4, config.scale_factor_spatial, config.scale_factor_spatial)
    for size in ((1, 32, 32), (9, 32, 64)):
        assert vae.encode(clips(1, 3, *size)).mode().shape[1:] == vae.latent_shape(*size)
    assert vae.decode(torch.zeros(1, *vae.latent_shape(9, 32, 64))).shape == (1, 3, 9, 32, 64)


def test_it_is_frozen_and_loads_once(checkpoints):
    vae = loaded(checkpoints["t2v"])
    model = vae.model
    mm_core.load_frozen(vae, CPU)
    assert vae.model is model and not vae.train().training
    assert not any(parameter.requires_grad for parameter in vae.parameters())
    assert not any(tensor.is_meta for tensor in vae.state_dict().values())


def test_the_pipelines_folder_and_shards_load_too(checkpoints, tmp_path):
    sharded = make_tiny_checkpoint(tmp_path, max_shard_size="50KB")
    assert len(list((sharded / "vae").glob("*.safetensors"))) > 1
    whole, parts = loaded(checkpoints["t2v"] / "vae"), loaded(sharded)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_clip(checkpoints):
    """Bytes that torch allocates above input and moments, 81 against 17 frames. Tiny layers are the worst
    case: whatever grows with the clip is a larger share of theirs."""
    for variant, dtype in (("t2v", "fp32"), ("ti2v", "fp32"), ("ti2v", "bf16")):
        vae = loaded(checkpoints[variant], dtype=dtype)
        vae.encode(clips(1, 3, 5, 64, 64))
        short, long = (benchmark.cpu_peak(vae, clips(1, 3, frames, 64, 64)) for frames in (17, 81))
        assert long <= 1.15 * short, f"{variant} {dtype}: {long / short:.3f}"


# -- what is not there, or not right --------------------------------------------------------------


def test_a_config_without_numbers_has_diffusers_own(copied):
    config = json.loads((copied / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in ("latents_mean", "latents_std")}
    (copied / "config.json").write_text(json.dumps(kept))
    defaults, vae = AutoencoderKLWan.from_pretrained(copied).config, loaded(copied)
    posterior = vae.encode(clips(1, 3, 1, 16, 16))
    mean = torch.tensor(defaults.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(defaults.latents_std).view(1, -1, 1, 1, 1)
    assert torch.equal(posterior.mode(), (posterior.moments.chunk(2, 1)[0] - mean) * (1.0 / std))


def test_without_files_the_published_sizes_are_assumed(tmp_path):
    folder = tmp_path / "vae"
    small, large = WanVAE(str(folder)), WanVAE(str(folder), latent_channels=48)
    assert small.latent_shape(81, 480, 832) == (16, 21, 60, 104)
    assert large.latent_shape(121, 704, 1280) == (48, 31, 44, 80)
    assert small.missing_files() == [
        str(folder / "config.json"),
        str(folder / "diffusion_pytorch_model.safetensors"),
    ]


def test_a_missing_shard_is_named(tmp_path):
    folder = make_tiny_checkpoint(tmp_path, max_shard_size="50KB") / "vae"
    gone = sorted(folder.glob("*.safetensors"))[0]
    gone.unlink()
    assert WanVAE(str(folder)).missing_files() == [str(gone)]
    with pytest.raises(CheckpointError, match=f"files listed in this index are missing: {gone.name}"):
        loaded(folder)


def test_sizes_that_do_not_divide_are_one_error(checkpoint):
    vae = loaded(checkpoint)
    step = vae.stride[1]
    with pytest.raises(ContractError) as caught:
        vae.encode(clips(1, 3, 16, step, step + 4))
    assert str(caught.value) == (
        "the autoencoder 'wan/vae' cannot encode clips with num_frames 16 (nearest: 13 or 17) and "
        f"width {step + 4} (nearest: {step} or {2 * step})\n"
        f"  accepted: num_frames of 4k+1, height a multiple of {step}, width a multiple of {step}"
    )
    with pytest.raises(ContractError, match=r"num_frames 0 \(nearest: 1\)"):
        vae.latent_shape(0, step, step)


def test_another_models_folder(checkpoints):
    with pytest.raises(CheckpointError) as caught:
        loaded(checkpoints["t2v"] / "transformer")
    assert caught.value.what == (
        "this folder holds no Wan autoencoder: its config.json names the class WanTransformer3DModel"
    )


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"the folder of the autoencoder holds no config\.json"):
        loaded(tmp_path)


def test_other_channels_than_asked_for(checkpoints):
    with pytest.raises(CheckpointError) as caught:
        _ = WanVAE(str(checkpoints["ti2v"]), latent_channels=16).latent_channels
    assert caught.value.what == ("the autoencoder's latents have 48 channels, but latent_channels is 16")
    with pytest.raises(CheckpointError, match="48 channels, but latent_channels is 16"):
        loaded(checkpoints["ti2v"], latent_channels=16)


def test_a_truncated_file(copied):
    weights = copied / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="not a complete safetensors file: it is truncated"):
        loaded(copied)


def test_pickles_are_refused(copied):
    (copied / "diffusion_pytorch_model.safetensors").unlink()
    (copied / "Wan2.1_VAE.pth").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    vae = WanVAE(str(copied))
    assert vae.missing_files() == []
    with pytest.raises(CheckpointError, match=r"pickle files, which can run code: Wan2\.1_VAE\.pth"):
        mm_core.load_frozen(vae, CPU)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"base_dim": 8}, r"encoder\.conv_in\.weight \(4x3x3x3x3 in the file, 8x3x3x3x3 in the task\)"),
        ({"num_res_blocks": 2}, r"\d+ missing: WanVAE\.model\..* and \d+ more"),
        ({"dim_mult": 4}, "config.json describes no autoencoder that Diffusers can build"),
        ({"dim_mult": "wide"}, "config.json describes no autoencoder that Diffusers can build"),
        ({"latents_std": [1.0] * 4}, "latents_mean and latents_std need 16 numbers each"),
        ({"latents_std": [0.0] * 16}, "those in latents_std above 0"),
        ({"latents_mean": [float("nan")] * 16}, "finite numbers"),
        ({"latents_std": "abcdefghijklmnop"}, "latents_mean and latents_std need 16 numbers each"),
        ({"latents_mean": None}, "latents_mean and latents_std need 16 numbers each"),
        ({"temperal_downsample": [True] * 3}, "has 8 frames per latent, but AutoencoderKLWan encodes 4"),
    ],
)
def test_weights_of_another_size(copied, change, sentence):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=sentence):
        loaded(copied)


def test_a_tensor_too_many(copied):
    weights = copied / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(weights), "encoder.extra": torch.zeros(2)}, weights)
    with pytest.raises(CheckpointError, match=r"1 unexpected: encoder\.extra\n"):
        loaded(copied)


def test_tiles_that_leave_gaps(checkpoints):
    for tile in (TilingParam(64, 64, 80, 48), TilingParam(64, 60, 48, 48)):
        with pytest.raises(ContractError, match="leave gaps or cut latents"):
            loaded(checkpoints["t2v"], tiling=True, tiling_param=tile)
