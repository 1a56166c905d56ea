"""Variations of pictures: in range, drawn from the generator alone, and each doing what its name says."""

import pytest
import torch

from pullback.data.crops import CROPS, STRONG, Variation, varied
from pullback.errors import PullbackError


def pictures(count: int = 8, side: int = 40) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def draw(variation: Variation, seed: int = 0, size: int = 28, source: torch.Tensor | None = None) -> torch.Tensor:
    return varied(pictures() if source is None else source, size, variation, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("variation", [CROPS, STRONG], ids=["crops", "strong"])
@pytest.mark.parametrize("size", [28, 33])
def test_pictures_keep_their_number_and_range(variation, size):
    out = draw(variation, size=size)
    assert out.shape == (8, 3, size, size)
    assert out.min() >= 0 and out.max() <= 1


def test_the_same_seed_gives_the_same_pictures_and_another_seed_others():
    assert torch.equal(draw(STRONG, 0), draw(STRONG, 0))
    assert not torch.equal(draw(STRONG, 0), draw(STRONG, 1))


def test_about_half_of_the_pictures_are_mirrored_and_none_is_upside_down():
    ramp = torch.linspace(0, 1, 64).expand(64, 3, 64, 64).contiguous()
    across = draw(CROPS, source=ramp)
    mirrored = across[..., 0].mean((1, 2)) > across[..., -1].mean((1, 2))
    assert 16 < mirrored.sum() < 48
    down = draw(CROPS, source=ramp.mT.contiguous())
    assert (down[..., 0, :].mean((1, 2)) < down[..., -1, :].mean((1, 2))).all()


def test_a_crop_shows_a_part_and_not_the_rest():
    ramp = torch.linspace(0, 1, 64).expand(16, 3, 64, 64)
    out = draw(Variation(area=(0.1, 0.2)), source=ramp.contiguous())
    spread = out.amax((1, 2, 3)) - out.amin((1, 2, 3))
    assert (spread < 0.6).all() and (spread > 0.1).all()


def test_grey_pictures_have_three_equal_channels_as_often_as_asked():
    out = draw(Variation(grey=1.0))
    assert torch.equal(out[:, 0], out[:, 1]) and torch.equal(out[:, 1], out[:, 2])
    some = draw(Variation(grey=0.5), source=pictures(64))
    grey = (some[:, 0] == some[:, 1]).flatten(1).all(1).sum()
    assert 16 < grey < 48


def test_a_pasted_square_and_a_mosaic_show_other_pictures():
    flat = torch.linspace(0, 1, 8)[:, None, None, None].expand(8, 3, 40, 40).contiguous()
    pasted = draw(Variation(patch=1.0), source=flat)
    assert all(len(picture.unique()) == 2 for picture in (pasted * 1e4).round())
    mosaic = draw(Variation(mosaic=1.0), source=flat)
    assert all(len(picture.unique()) == 4 for picture in (mosaic * 1e4).round())


def test_colours_change_and_shapes_do_not():
    plain, coloured = draw(Variation()), draw(Variation(colour=0.4))
    assert not torch.allclose(plain, coloured)
    for one, other in zip(plain, coloured, strict=True):
        assert torch.corrcoef(torch.stack([one[0].flatten(), other[0].flatten()]))[0, 1] > 0.9


def test_an_impossible_area_is_refused():
    with pytest.raises(PullbackError, match=r"area: expected shares 0 < low <= high <= 1, got \(0.5, 1.5\)"):
        Variation(area=(0.5, 1.5))
