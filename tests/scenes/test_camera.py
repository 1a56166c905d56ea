"""Rays against unit shapes, set against closed forms; textures and random numbers."""

import math

import pytest
import torch
from torch import Tensor

from pullback.scenes.camera import box_interval, cylinder_interval, is_blocked, room_exit, sphere_interval
from pullback.scenes.draws import Draws, hashed
from pullback.scenes.look import noise, pattern
from pullback.scenes.splits import TEXTURES


def vector(*values: float) -> tuple[Tensor, Tensor, Tensor]:
    x, y, z = (torch.tensor(float(value)) for value in values)
    return x, y, z


def random_rays(count: int = 4000) -> tuple[Tensor, Tensor]:
    """Origins outside and directions roughly towards the unit shapes, each [3, count]."""
    generator = torch.Generator().manual_seed(0)
    origin = torch.randn(3, count, generator=generator)
    origin = 4 * origin / origin.norm(dim=0)
    return origin, 1.2 * torch.randn(3, count, generator=generator) - origin


INSIDE = {
    sphere_interval: lambda p: p.norm(dim=0) < 1,
    box_interval: lambda p: p.abs().amax(0) < 1,
    cylinder_interval: lambda p: (p[:2].norm(dim=0) < 1) & (p[2].abs() < 1),
}


# Shapes


def test_a_ray_through_the_middle_of_a_sphere_meets_it_at_distance_minus_radius():
    near, far = sphere_interval(vector(-5, 0, 0), vector(1, 0, 0))
    assert (near, far) == (4, 6)


def test_an_off_centre_ray_meets_a_sphere_where_pythagoras_says():
    near, far = sphere_interval(vector(-5, 0.6, 0), vector(1, 0, 0))
    torch.testing.assert_close((near, far), (torch.tensor(4.2), torch.tensor(5.8)))


def test_a_far_small_sphere_keeps_its_digits():
    near, _ = sphere_interval(vector(-3000, 0.6, 0), vector(1, 0, 0))
    assert near == pytest.approx(2999.2, abs=1e-3)


def test_a_slanted_ray_meets_the_face_of_a_box():
    near, far = box_interval(vector(-3, 0, 0), vector(1, 0.25, 0))
    assert (near, far) == (2, 4)
    near, far = box_interval(vector(-3, -1, 0), vector(1, 1, 0))  # leaves through y = 1
    torch.testing.assert_close((near, far), (torch.tensor(2.0), torch.tensor(2.0)))


def test_a_cylinder_is_met_on_its_side_and_on_its_cap():
    assert cylinder_interval(vector(-4, 0, 0.5), vector(2, 0, 0))[0] == 1.5
    assert cylinder_interval(vector(0.3, 0.2, 5), vector(0, 0, -1)) == (4, 6)
    near, _ = cylinder_interval(vector(0, 0, 3), vector(0.25, 0, -1))  # through the cap at x = 0.5
    assert near == 2


@pytest.mark.parametrize("interval", INSIDE)
def test_rays_that_pass_by_have_no_interval(interval):
    for origin, direction in [((-5, 2, 0), (1, 0, 0)), ((0, 0, 3), (1, 0, 0)), ((2, 2, 5), (0, 0, -1))]:
        near, far = interval(vector(*origin), vector(*direction))
        assert not near < far


@pytest.mark.parametrize("interval", INSIDE)
def test_random_rays_agree_with_marching_along_them(interval):
    origin, direction = random_rays()
    steps = torch.linspace(0, 3, 1501)
    inside = INSIDE[interval](origin[..., None] + direction[..., None] * steps)  # [rays, steps]
    near, far = interval(tuple(origin), tuple(direction))
    hit = near < far
    long_chord = inside.sum(-1) > 2
    assert hit[long_chord].all()
    assert (inside.any(-1) <= hit).all()
    assert 0.2 < long_chord.float().mean() < 0.98
    first = steps[inside.float().argmax(-1)]
    assert (near - first)[long_chord].abs().max() < 2.1e-3
    surface = origin + direction * near
    outside = INSIDE[interval]((surface - 1e-3 * direction)[:, long_chord])
    assert not outside.any()


@pytest.mark.parametrize(
    ("near", "far", "blocked"), [(0.2, 0.4, True), (-1, 0.5, True), (1.2, 2, False), (-2, -1, False), (0.5, 0.4, False)]
)
def test_only_what_lies_between_the_ends_blocks_a_segment(near, far, blocked):
    assert is_blocked((torch.tensor(near), torch.tensor(far))) == blocked
    assert not is_blocked((torch.tensor(math.nan), torch.tensor(math.nan)))


@pytest.mark.parametrize(
    ("direction", "depth", "face"),
    [
        ((-1, 0, 0), 2, 0),
        ((1, 0, 0), 3, 1),
        ((0, -1, 0), 4, 2),
        ((0.1, 1, 0), 5, 3),
        ((0, 0, -1), 1.5, 4),
        ((0, 0.1, 1), 1, 5),
    ],
)
def test_a_room_is_left_through_the_right_face(direction, depth, face):
    exit_depth, exit_face = room_exit(vector(0, 0, 1.5), vector(*direction), vector(-2, -4, 0), vector(3, 5, 2.5))
    assert (exit_depth, exit_face) == (depth, face)


# Textures


@pytest.mark.parametrize("name", TEXTURES)
def test_textures_stay_in_range_and_fade_to_gray_far_away(name):
    generator = torch.Generator().manual_seed(0)
    u, v = 40 * torch.rand(2, 1, 64, 64, generator=generator) - 20
    kind = torch.full_like(u, TEXTURES.index(name))
    near, far = (pattern(kind, u, v, torch.full_like(u, width), noise(u, v)[0], {name}) for width in (0.01, 3.0))
    assert near.abs().max() <= 1
    if name not in ("plain", "gradient"):  # the one has no pattern, the other no cells
        assert near.std() > 0.2
        assert far.std() < 1e-6
        assert abs(near.mean() - far.mean()) < 0.12


def test_a_checker_changes_colour_in_each_neighbouring_cell():
    u, v = torch.tensor([[[0.5, 1.5, 1.5, -0.5]]]), torch.tensor([[[0.5, 0.5, 1.5, 0.5]]])
    kind = torch.full_like(u, TEXTURES.index("checker"))
    values = pattern(kind, u, v, torch.full_like(u, 0.01), torch.zeros_like(u), {"checker"})
    assert values.flatten().tolist() == [1, -1, 1, -1]


def test_noise_is_continuous_where_its_tile_repeats():
    across = torch.tensor([[[15.999, 16.001, -0.001, 0.001]]])
    values = torch.stack(noise(across, torch.full_like(across, 3.3)))
    assert values.std(-1).max() < 0.02


# Random numbers


def test_random_numbers_are_uniform_and_independent_of_each_other():
    draws = Draws(torch.arange(20_000))
    first, second = draws.uniform("first"), draws.uniform("second", count=2)
    for values in (first, second):
        assert values.min() >= 0
        assert values.max() < 1
        assert values.mean() == pytest.approx(0.5, abs=0.01)
        assert values.var() == pytest.approx(1 / 12, abs=0.003)
    together = torch.corrcoef(torch.cat([first, second, first.roll(1, 0)], 1).T)
    assert (together - torch.eye(4)).abs().max() < 0.03


def test_a_longer_draw_begins_with_the_shorter_one():
    draws = Draws(torch.tensor([5, -7]))
    assert torch.equal(draws.uniform("views", count=5)[:, :2], draws.uniform("views", count=2))
    counts = Draws(torch.arange(3000)).integer("count", 2, 4)
    assert set(counts.flatten().tolist()) == {2, 3, 4}


def test_the_hash_is_splitmix64():
    assert hashed(torch.tensor(0)).item() % 2**64 == 0xE220A8397B1DCDAF  # the first output of the reference for seed 0
