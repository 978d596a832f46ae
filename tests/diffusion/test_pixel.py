"""The pixel autoencoder loses nothing and declares which clips it takes."""

import pytest
import torch

from mm_core.contracts import Autoencoder
from mm_core.diffusion.encoders.pixel import PixelAutoencoder
from mm_core.errors import ContractError


@pytest.mark.parametrize(("spatial", "temporal"), [(1, 1), (2, 1), (2, 2), (4, 3)])
def test_decoding_returns_the_very_pixels(spatial, temporal):
    autoencoder = PixelAutoencoder(spatial, temporal)
    pixels = torch.rand(2, 3, 6, 8, 12) * 2 - 1
    latents = autoencoder.encode(pixels).mode()
    assert isinstance(autoencoder, Autoencoder)
    assert tuple(latents.shape[1:]) == autoencoder.latent_shape(6, 8, 12)
    assert torch.equal(autoencoder.decode(latents), pixels)


def test_a_latent_holds_the_pixels_of_its_own_block():
    pixels = torch.arange(2 * 4 * 4).float().view(1, 1, 2, 4, 4).expand(1, 3, 2, 4, 4)
    latents = PixelAutoencoder(spatial=2, temporal=2).encode(pixels).mode()
    assert latents[0, :8, 0, 1, 0].tolist() == pixels[0, 0, :, 2:4, 0:2].flatten().tolist()


def test_its_posterior_has_no_spread():
    posterior = PixelAutoencoder().encode(torch.rand(1, 3, 1, 4, 4))
    assert torch.equal(posterior.sample([torch.Generator()]), posterior.mode())


def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do():
    with pytest.raises(ContractError) as caught:
        PixelAutoencoder(spatial=16, temporal=4).latent_shape(49, 480, 830)
    assert "num_frames 49 (nearest: 48, 52)" in str(caught.value)
    assert "width 830 (nearest: 816, 832)" in str(caught.value)
    assert "height" not in caught.value.what
    assert "multiples of 4, 16, 16" in str(caught.value)


def test_a_single_image_is_refused_where_frames_are_folded():
    with pytest.raises(ContractError, match=r"num_frames 1 \(nearest: 2\)"):
        PixelAutoencoder(spatial=2, temporal=2).encode(torch.zeros(1, 3, 1, 4, 4))
