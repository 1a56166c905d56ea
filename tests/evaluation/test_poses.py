"""Angles between cameras against rotations that are known, down to the last digits."""

import math

import pytest
import torch

from pullback.errors import ShapeError
from pullback.evaluation.poses import direction_angle, pose_errors, relative_poses, rotation_angle, view_pairs
from recipes.measurement import mean_rotation, median_with_error


def turn(axis, degrees: float) -> torch.Tensor:
    """exp of the axis' cross product matrix, by its own series."""
    axis = torch.tensor(axis, dtype=torch.float64)
    x, y, z = (axis / axis.norm() * math.radians(degrees)).tolist()
    return torch.linalg.matrix_exp(torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=torch.float64))


def cameras(*poses) -> torch.Tensor:
    """[1, S, 3, 4] from (rotation, translation)."""
    rows = [torch.cat([r, torch.tensor(t, dtype=torch.float64)[:, None]], 1) for r, t in poses]
    return torch.stack(rows)[None]


@pytest.mark.parametrize("degrees", [0.0, 1e-9, 1e-4, 5.0, 90.0, 179.9, 180 - 1e-6, 180.0])
def test_a_known_turn_is_found_whatever_it_starts_from(degrees):
    start = turn([1.0, -2.0, 0.5], 70)
    got = rotation_angle(turn([0.3, 1.0, -2.0], degrees) @ start, start).item()
    assert got == pytest.approx(degrees, rel=1e-7, abs=2e-14 * 180)
    assert rotation_angle(start, turn([0.3, 1.0, -2.0], degrees) @ start).item() == pytest.approx(got)


@pytest.mark.parametrize("degrees", [0.0, 1e-9, 10.0, 90.0, 180.0])
def test_directions_of_any_length_are_compared_by_angle(degrees):
    first = torch.tensor([0.0, 3.0, 0.0], dtype=torch.float64)
    second = 1e-3 * turn([1.0, 0.0, 0.0], degrees) @ first
    assert direction_angle(first, second).item() == pytest.approx(degrees, rel=1e-7, abs=1e-13)
    assert direction_angle(first, torch.zeros(3)).isnan()


def test_a_change_of_world_or_scale_is_no_error_and_a_turned_camera_is():
    truth = cameras(
        (torch.eye(3, dtype=torch.float64), [0.0, 0.0, 0.0]),
        (turn([0.0, 1.0, 0.0], 20), [1.0, 0.0, 0.2]),
        (turn([1.0, 1.0, 0.0], -30), [-0.5, 0.3, 0.1]),
    )
    world, shift = turn([1.0, 2.0, 3.0], 50), torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)[:, None]
    moved = torch.cat([truth[..., :3] @ world, 2.5 * (truth[..., 3:] + truth[..., :3] @ shift)], -1)
    same = pose_errors(moved, truth)
    assert same.rotation.shape == same.translation.shape == (1, 3)
    assert same.rotation.max() < 1e-6 and same.translation.max() < 1e-6
    wrong = truth.clone()
    wrong[0, 2] = turn([0.0, 0.0, 1.0], 7) @ truth[0, 2]  # camera 2 rolled: its translation rolls along
    errors = pose_errors(wrong, truth)
    torch.testing.assert_close(errors.rotation, torch.tensor([[0.0, 7.0, 7.0]], dtype=torch.float64))
    assert errors.translation[0, 0] == 0 and 0 < errors.translation[0, 1] <= 7


def test_a_relative_pose_takes_points_of_one_camera_into_the_other():
    truth = cameras((turn([1.0, 0.0, 1.0], 40), [0.1, 0.2, 0.3]), (turn([0.0, 1.0, 1.0], 80), [1.0, -1.0, 2.0]))
    assert view_pairs(3).tolist() == [[0, 1], [0, 2], [1, 2]]
    point = torch.tensor([0.4, -0.7, 1.5], dtype=torch.float64)
    seen = truth[0, :, :, :3] @ point + truth[0, :, :, 3]
    pair = relative_poses(truth)[0, 0]
    torch.testing.assert_close(pair[:, :3] @ seen[0] + pair[:, 3], seen[1])


def test_the_mean_rotation_is_in_the_middle():
    axis = [0.2, -1.0, 0.4]
    mean = mean_rotation(torch.stack([turn(axis, angle) for angle in (-10.0, 30.0)]))
    assert rotation_angle(mean, turn(axis, 10.0)) < 1e-6
    assert torch.linalg.det(mean_rotation(torch.stack([turn(axis, 0), turn(axis, 180), turn(axis, 90)]))) > 0.999


def test_medians_leave_out_what_is_unknown_and_scenes_are_resampled_whole():
    values = torch.randn(400, 1, generator=torch.Generator().manual_seed(0)).repeat(1, 5)
    values[0, 0] = torch.nan
    result = median_with_error(values, resamples=300)
    assert result["median"] == pytest.approx(0, abs=0.2)
    assert result["se"] == pytest.approx(math.sqrt(math.pi / 2 / 400), rel=0.3)  # of 400, not of 2000
    assert result == median_with_error(values, resamples=300)


@pytest.mark.parametrize("shape", [(1, 1, 3, 4), (3, 3, 4), (1, 2, 4, 4)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ShapeError, match=r"expected extrinsics \[B, S, 3, 4\]"):
        pose_errors(torch.zeros(shape), torch.zeros(shape))
