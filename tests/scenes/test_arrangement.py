"""What stands where: classes, room, cameras, and ranges."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pullback.errors import PullbackError
from pullback.scenes import CLASSES, SHIFTED, TRAINING, SceneRange, scene_labels
from pullback.scenes.arrangement import NOTHING, Layout, lay_out
from pullback.scenes.draws import Draws
from pullback.scenes.splits import MAX_MAIN

SCENES = 2000
VIEWS = 4


@pytest.fixture(scope="module", params=[TRAINING, SHIFTED], ids=["training", "shifted"])
def layout(request) -> Layout:
    return lay_out(Draws(torch.arange(SCENES)), VIEWS, request.param)


def positions(layout: Layout) -> Tensor:
    """Of the cameras, [B, V, 3]."""
    pose = layout.cameras.pose
    return -(pose[..., :3, :3].mT @ pose[..., :3, 3:]).squeeze(-1)


def test_classes_are_distinct_and_equally_frequent():
    assert len(set(CLASSES)) == len(CLASSES) >= 12
    counts = torch.bincount(scene_labels(range(SCENES)), minlength=len(CLASSES)).double()
    expected = SCENES / len(CLASSES)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 49.7  # the 0.999 quantile for 23 degrees of freedom


def test_objects_stand_on_the_ground_or_on_each_other(layout):
    objects = layout.objects
    there = objects.shape != NOTHING
    bottom = objects.centre[..., 2] - objects.half[..., 2]
    towers = torch.tensor(["tower" in name for name in CLASSES])[layout.label]
    storey = torch.zeros_like(there)
    storey[:, 1:MAX_MAIN] = towers[:, None]
    torch.testing.assert_close(bottom[there & ~storey], torch.zeros_like(bottom[there & ~storey]))
    top = objects.centre[..., 2] + objects.half[..., 2]
    stacked = (storey & there)[:, 1:MAX_MAIN]
    torch.testing.assert_close(bottom[:, 1:MAX_MAIN][stacked], top[:, : MAX_MAIN - 1][stacked])


def test_objects_do_not_meet(layout):
    objects = layout.objects
    there = objects.shape != NOTHING
    wall = objects.shape.shape[1] - 2  # long and thin: a disc around it says nothing
    keep = [slot for slot in range(objects.shape.shape[1]) if slot != wall]
    centre, reach, half, there = (x[:, keep] for x in (objects.centre, objects.reach, objects.half, there))
    apart = (centre[:, :, None, :2] - centre[:, None, :, :2]).norm(dim=-1) - reach[:, :, None] - reach[:, None]
    above = (centre[:, :, None, 2] - centre[:, None, :, 2]).abs() - half[:, :, None, 2] - half[:, None, :, 2]
    pairs = there[:, :, None] & there[:, None] & ~torch.eye(len(keep), dtype=torch.bool)
    assert not (pairs & (apart < 0) & (above < -1e-9)).any()


def test_cameras_keep_clear_of_objects_and_walls(layout):
    camera, objects = positions(layout), layout.objects
    away = camera[:, :, None] - objects.centre[:, None]
    cos, sin = objects.yaw.cos()[:, None], objects.yaw.sin()[:, None]
    local = torch.stack(
        [cos * away[..., 0] + sin * away[..., 1], cos * away[..., 1] - sin * away[..., 0], away[..., 2]]
    )
    gap = (local.movedim(0, -1).abs() - objects.half[:, None]).clamp(min=0).norm(dim=-1)  # to the box around it
    assert gap[(objects.shape != NOTHING)[:, None].expand_as(gap)].min() > 0.3
    assert (camera - layout.low[:, None]).min() > 0.29
    assert (layout.high[:, None] - camera).min() > 0.29


def test_rooms_hold_their_objects(layout):
    objects = layout.objects
    there = objects.shape != NOTHING
    reach = torch.stack([objects.reach, objects.reach, objects.half[..., 2]], -1)
    assert (objects.centre - reach - layout.low[:, None])[there].min() > -1e-9
    assert (layout.high[:, None] - objects.centre - reach)[there].min() > -1e-9


def test_camera_0_has_the_arrangement_in_view(layout):
    pose = layout.cameras.pose[:, 0]
    main = layout.objects.centre[:, :MAX_MAIN]
    local = (pose[:, None, :3, :3] @ main[..., None]).squeeze(-1) + pose[:, None, :3, 3]
    edge = (layout.cameras.fov / 2).tan()[:, None]
    inside = (local[..., :2].abs().amax(-1) / local[..., 2] < edge) & (local[..., 2] > 0)
    assert (inside | (layout.objects.shape[:, :MAX_MAIN] == NOTHING)).all(1).double().mean() > 0.99


def test_further_cameras_look_at_the_arrangement_from_elsewhere(layout):
    camera, pose = positions(layout), layout.cameras.pose
    assert (camera[:, 1:] - camera[:, :1]).norm(dim=-1).min() > 0.1
    forward = pose[:, :, 2, :3]
    assert (forward[:, 1:] * forward[:, :1]).sum(-1).min() > 0.35  # never more than about 70 degrees apart
    assert (-forward * camera).sum(-1).min() > 0


def test_the_scene_does_not_depend_on_the_number_of_views():
    one, many = (lay_out(Draws(torch.arange(50)), views, TRAINING) for views in (1, 5))
    assert torch.equal(one.objects.centre, many.objects.centre)
    assert torch.equal(one.high, many.high)
    assert torch.equal(one.cameras.pose[:, 0], many.cameras.pose[:, 0])


def test_heights_are_those_of_the_ranges(layout):
    ranges = TRAINING if positions(layout)[..., 2].max() < 2 else SHIFTED
    low, high = ranges.camera_height
    assert (positions(layout)[:, 0, 2] >= low - 1e-9).all()
    assert (positions(layout)[:, 0, 2] <= high + 1e-9).all()


def test_shifted_ranges_lie_outside_the_training_ranges():
    assert SHIFTED.camera_height[0] > TRAINING.camera_height[1]
    assert SHIFTED.texture_scale[0] > TRAINING.texture_scale[1]
    assert not set(SHIFTED.textures) & set(TRAINING.textures)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"camera_height": (2.0, 1.0)}, r"camera_height=\(2.0, 1.0\): expected \(low, high\)"),
        ({"camera_height": (0.0, 1.0)}, "camera_height.*positive"),
        ({"textures": ("fur",)}, "textures=.*expected some of plain"),
        ({"textures": ()}, "textures=.*expected some of plain"),
        ({"row_count": (4, 9)}, "row_count.*counts from 1 to 8"),
        ({"lights": (0, 1)}, "lights.*counts from 1 to 3"),
        ({"distractors": (0, 4)}, "distractors.*counts from 0 to 3"),
        ({"fov_degrees": (50, 180)}, "fov_degrees.*between 0 and 170"),
    ],
)
def test_impossible_ranges_are_refused(change, message):
    with pytest.raises(PullbackError, match=message):
        SceneRange(**change)
    assert replace(TRAINING, lights=(1, 1)).lights == (1, 1)
