"""Rendered scenes: geometry against the layout they came from, views against each other, light and shadow."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pullback.scenes import CLASSES, TRAINING, SceneBatch, render, scene_labels
from pullback.scenes.arrangement import Layout, lay_out
from pullback.scenes.draws import Draws
from pullback.scenes.look import look_of
from pullback.scenes.splits import BOX, CYLINDER, SPHERE


@pytest.fixture(scope="module")
def batch() -> SceneBatch:
    return render(range(24), size=64, views=3)


@pytest.fixture(scope="module")
def layout() -> Layout:
    return lay_out(Draws(torch.arange(24)), 3, TRAINING)


def seeds_of(part: str) -> list[int]:
    """Seeds whose class has this in its name."""
    return [seed for seed, label in enumerate(scene_labels(range(300)).tolist()) if part in CLASSES[label]]


def in_frame(points: Tensor, layout: Layout, slot: int) -> Tensor:
    """World points [B, ..., 3] in the frame of an object, in units of its half size."""
    objects, axes = layout.objects, (slice(None), slot) + (None,) * (points.ndim - 2)
    away = points - objects.centre[axes].to(points)
    cos, sin = (values[axes].to(points) for values in (objects.yaw.cos(), objects.yaw.sin()))
    turned = [cos * away[..., 0] + sin * away[..., 1], cos * away[..., 1] - sin * away[..., 0], away[..., 2]]
    return torch.stack(turned, -1) / objects.half[axes].to(points)


def implicit(local: Tensor, shape: Tensor) -> Tensor:
    """1 on the surface of the unit shape, less inside, more outside."""
    size = local.abs()
    sphere, box = local.norm(dim=-1), size.amax(-1)
    cylinder = torch.maximum(local[..., :2].norm(dim=-1), size[..., 2])
    kind = shape.view(-1, *(1,) * (local.ndim - 2))
    return torch.where(kind == SPHERE, sphere, torch.where(kind == BOX, box, cylinder))


# Geometry


def test_shapes_and_kinds_of_everything(batch):
    assert batch.rgb.shape == batch.normals.shape == (24, 3, 3, 64, 64)
    assert batch.depth.shape == batch.sky.shape == batch.instance.shape == (24, 3, 64, 64)
    assert batch.points().shape == (24, 3, 64, 64, 3)
    assert batch.intrinsics.shape == (24, 3, 3, 3)
    assert batch.pose.shape == (24, 3, 4, 4)
    assert (batch.rgb.dtype, batch.sky.dtype, batch.instance.dtype) == (torch.float32, torch.bool, torch.int16)
    assert (batch.label.dtype, batch.label.shape, len(batch)) == (torch.int64, (24,), 24)
    assert batch.first_view().rgb.shape == (24, 1, 3, 64, 64)
    assert torch.equal(batch.first_view().label, batch.label)
    assert render([0], size=(20, 30)).depth.shape == (1, 1, 20, 30)


def test_every_point_lies_on_the_surface_that_its_instance_names(batch, layout):
    seen = dict.fromkeys((SPHERE, BOX, CYLINDER), 0)
    for slot in range(layout.objects.shape.shape[1]):
        level = implicit(in_frame(batch.points().double(), layout, slot), layout.objects.shape[:, slot])
        mine = batch.instance == layout.objects.instance[:, slot, None, None, None]
        if slot == layout.objects.shape.shape[1] - 2:  # the garden wall shares its number with a wall of rooms
            mine &= layout.is_open[:, None, None, None]
        size = layout.objects.half[:, slot].amin(-1)[:, None, None, None]
        assert ((level - 1) * size)[mine].abs().le(2e-4).all()
        for shape in seen:
            seen[shape] += int(mine[layout.objects.shape[:, slot] == shape].sum())
    assert min(seen.values()) > 1000


def test_floor_walls_and_ceiling_are_planes_where_the_layout_has_them(batch, layout):
    points = batch.points().double()
    bounds = {1: (layout.low, 2), 2: (layout.low, 0), 3: (layout.high, 0), 4: (layout.low, 1), 5: (layout.high, 1)}
    bounds[6] = (layout.high, 2)
    room = ~layout.is_open[:, None, None, None]
    for instance, (bound, axis) in bounds.items():
        mine = (batch.instance == instance) & (room | (instance == 1))
        assert mine.any()
        assert (points[..., axis] - bound[:, axis, None, None, None])[mine].abs().max() < 1e-4


def test_nothing_lies_in_front_of_what_is_seen():
    """March along every ray, up to just before its depth: no sample may be inside an object."""
    batch, layout = render(range(40), size=24), lay_out(Draws(torch.arange(40)), 1, TRAINING)
    shape = layout.objects.shape
    share = torch.linspace(0.01, 0.995, 60)
    ends = replace(batch, depth=torch.where(batch.sky, 40.0, batch.depth)).points()[:, 0, :, :, None]
    camera = -(batch.pose[:, 0, :3, :3].mT @ batch.pose[:, 0, :3, 3:]).squeeze(-1)[:, None, None, None]
    samples = camera + share[:, None] * (ends - camera)  # [B, H, W, share, 3]
    for slot in range(shape.shape[1]):
        there = shape[:, slot] >= 0
        level = implicit(in_frame(samples, layout, slot), shape[:, slot])
        assert not (level[there] < 0.995).any()


def test_the_depth_of_a_centred_sphere_is_its_distance_less_its_radius():
    ranges = replace(TRAINING, pitch_degrees=(0, 0), roll_degrees=(0, 0), distractors=(0, 0))
    giants = seeds_of("giant sphere")[:6]
    batch = render(giants, size=33, ranges=ranges)
    layout = lay_out(Draws(torch.tensor(giants)), 1, ranges)
    camera = -(batch.pose[:, 0, :3, :3].mT @ batch.pose[:, 0, :3, 3:]).squeeze(-1)
    expected = (camera - layout.objects.centre[:, 0]).norm(dim=-1) - layout.objects.half[:, 0, 0]
    torch.testing.assert_close(batch.depth[:, 0, 16, 16].double(), expected, atol=1e-4, rtol=0)


def test_normals_are_unit_and_face_the_camera(batch):
    length = batch.normals.norm(dim=2)
    torch.testing.assert_close(length[~batch.sky], torch.ones_like(length[~batch.sky]), atol=1e-4, rtol=0)
    assert (length[batch.sky] == 0).all()
    height, width = batch.depth.shape[-2:]
    x, y = (torch.arange(width) + 0.5)[None, :], (torch.arange(height) + 0.5)[:, None]
    focal, middle = batch.intrinsics[..., 0, 0, None, None], batch.intrinsics[..., :2, 2]
    ray = torch.stack(
        [(x - middle[..., 0, None, None]) / focal + 0 * y, (y - middle[..., 1, None, None]) / focal + 0 * x], 2
    )
    along = (batch.normals[:, :, :2] * ray).sum(2) + batch.normals[:, :, 2]
    assert (along[~batch.sky] < 1e-4).all()


def test_normals_agree_with_differences_of_points_away_from_edges():
    batch = render(range(16), size=128)
    points, normals = batch.points()[:, 0], batch.normals[:, 0].movedim(1, -1)
    normals = normals @ batch.pose[:, 0, None, :3, :3]  # rows times the rotation: from camera to world
    across = points[:, 1:-1, 2:] - points[:, 1:-1, :-2]
    down = points[:, 2:, 1:-1] - points[:, :-2, 1:-1]
    found = torch.nn.functional.normalize(torch.linalg.cross(down, across), dim=-1)
    agreement = (found * normals[:, 1:-1, 1:-1]).sum(-1)
    patches = normals.unfold(1, 3, 1).unfold(2, 3, 1).flatten(-2)  # [B, H-2, W-2, 3, 9]
    smooth = (patches - normals[:, 1:-1, 1:-1, :, None]).norm(dim=3).amax(-1) < 0.2
    one = batch.instance[:, 0].unfold(1, 3, 1).unfold(2, 3, 1).flatten(-2)
    inner = smooth & (one == one[..., :1]).all(-1) & ~batch.sky[:, 0, 1:-1, 1:-1]
    assert inner.float().mean() > 0.5
    assert (agreement[inner] > 0.99).float().mean() > 0.995


def test_poses_are_rigid_and_follow_opencv(batch):
    rotation = batch.pose[..., :3, :3]
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(3).expand_as(rotation), atol=1e-5, rtol=0)
    assert (torch.linalg.det(rotation) > 0.99).all()
    up = rotation[..., :, 2]  # the world's z axis in camera coordinates
    assert (up[..., 1] < -0.6).all()  # y points down
    assert (up[..., 0].abs() < 0.12).all()  # roll is small
    floor = (batch.instance == 1).float()
    assert floor[..., 32:, :].mean() > floor[..., :32, :].mean()


def test_intrinsics_describe_square_pixels_around_the_middle():
    matrix = render([3], size=(48, 80)).intrinsics[0, 0]
    assert matrix[0, 0] == matrix[1, 1]
    assert matrix[:2, 2].tolist() == [40, 24]
    low, high = TRAINING.fov_degrees
    assert low < 2 * torch.rad2deg(torch.atan(24 / matrix[0, 0])) < high


def test_points_project_back_to_their_pixels(batch):
    points = batch.points()
    local = points @ batch.pose[..., None, :3, :3].mT + batch.pose[..., None, None, :3, 3]
    pixel = local @ batch.intrinsics[..., None, :, :].mT
    x, y = pixel[..., 0] / pixel[..., 2], pixel[..., 1] / pixel[..., 2]
    there = ~batch.sky
    assert (x - (torch.arange(64) + 0.5))[there].abs().max() < 2e-3
    assert (y - (torch.arange(64) + 0.5)[:, None])[there].abs().max() < 2e-3


def test_views_agree_where_they_see_the_same(batch):
    """Points of view 0 that view 1 also sees have there the same depth and the same instance."""
    agree, depths, same_instance = [], [], []
    for scene in range(len(batch)):
        points = batch.points()[scene, 0][~batch.sky[scene, 0]]
        pose, matrix = batch.pose[scene, 1], batch.intrinsics[scene, 1]
        local = points @ pose[:3, :3].T + pose[:3, 3]
        pixel = local @ matrix.T
        column, row = (pixel[:, axis] / pixel[:, 2] for axis in (0, 1))
        inside = (local[:, 2] > 0.1) & (column >= 0) & (column < 64) & (row >= 0) & (row < 64)
        row, column, expected = row[inside].long(), column[inside].long(), local[inside, 2]
        seen = batch.depth[scene, 1][row, column]
        error = (seen - expected) / expected
        assert inside.float().mean() > 0.25
        # A point can be hidden in the other view, never the other way round: nothing may be seen through it.
        depths.append((error < 0.1).float().mean())
        agree.append((error.abs() < 0.1).float().mean())
        visible = error.abs() < 0.02
        ids = batch.instance[scene, 0][~batch.sky[scene, 0]][inside]
        same_instance.append((ids == batch.instance[scene, 1][row, column])[visible].float().mean())
    assert torch.stack(depths).mean() > 0.95
    assert torch.stack(agree).mean() > 0.85
    assert torch.stack(same_instance).min() > 0.9


def test_instances_are_shared_by_the_views(batch):
    for scene in range(len(batch)):
        seen = [set(batch.instance[scene, view].unique().tolist()) for view in range(3)]
        main = {instance for instance in seen[0] if 10 <= instance < 18}
        assert main
        assert all(len(main & other) >= 0.6 * len(main) for other in seen[1:])


def test_sky_depth_and_instance_agree(batch):
    assert torch.equal(batch.sky, batch.depth == 0)
    assert torch.equal(batch.sky, batch.instance == 0)
    room = torch.tensor([CLASSES[label].startswith("room") for label in batch.label])
    assert not batch.sky[room].any()
    assert batch.sky[~room].any(-1).any(-1).float().mean() > 0.4


# Light


def test_ground_in_the_shadow_is_darker():
    """One sun, plain ground: of two pixels on the ground the one from which an object hides the sun is darker."""
    ranges = replace(TRAINING, lights=(1, 1), textures=("plain",))
    seeds = seeds_of("open ground")[:12]
    batch = render(seeds, size=64, ranges=ranges)
    draws = Draws(torch.tensor(seeds))
    layout = lay_out(draws, 1, ranges)
    sun = look_of(draws, layout, ranges).lights.place[:, 0]
    share = torch.linspace(0.0002, 0.05, 60)[:, None]  # of the sun's vector, which is 100 m long
    samples = batch.points()[..., None, :] + share * sun[:, None, None, None, None].float()
    hidden = torch.zeros_like(batch.sky)
    for slot in range(layout.objects.shape.shape[1]):
        shape = layout.objects.shape[:, slot]
        inside = (implicit(in_frame(samples, layout, slot), shape) < 0.98).any(-1)
        hidden |= inside & (shape >= 0)[:, None, None, None]
    ground = (batch.instance == 1) & (batch.depth < 8)
    brightness = batch.rgb.mean(2)
    found = 0
    for scene in range(len(seeds)):
        dark, light = (brightness[scene][ground[scene] & mask] for mask in (hidden[scene], ~hidden[scene]))
        if len(dark) > 20 and len(light) > 20:
            assert dark.median() < 0.9 * light.median()
            found += 1
    assert found >= 6


def test_the_side_of_a_ball_that_faces_the_sun_is_the_bright_one():
    ranges = replace(TRAINING, lights=(1, 1), textures=("plain",))
    seeds = seeds_of("open ground: one giant sphere")
    batch, draws = render(seeds, size=48, ranges=ranges), Draws(torch.tensor(seeds))
    sun = look_of(draws, lay_out(draws, 1, ranges), ranges).lights.place[:, 0].float() / 100
    towards = (batch.pose[:, 0, :3, :3] @ sun[..., None])[..., None]  # in camera coordinates, [B, 3, 1, 1]
    cosine = (batch.normals[:, 0] * towards).sum(1)
    ball, brightness = batch.instance[:, 0] == 10, batch.rgb[:, 0].mean(1)
    found = 0
    for scene in range(len(seeds)):
        light, dark = (brightness[scene][ball[scene] & side[scene]] for side in (cosine > 0.6, cosine < -0.05))
        if len(light) > 20 and len(dark) > 20:
            assert light.quantile(0.05) > 1.2 * dark.median()  # all of it: a ball casts no shadow on its own lit side
            found += 1
    assert found >= 3


def test_lit_surfaces_have_no_speckles():
    """On plain surfaces a pixel rarely differs much from the median of its neighbours: rounding casts no shadows."""
    ranges = replace(TRAINING, textures=("plain",), distractors=(0, 0))
    batch = render(range(8), size=96, ranges=ranges)
    gray = batch.rgb[:, 0].mean(1)
    patches = gray.unfold(1, 3, 1).unfold(2, 3, 1).flatten(-2)
    ids = batch.instance[:, 0].unfold(1, 3, 1).unfold(2, 3, 1).flatten(-2)
    inner = (ids == ids[..., :1]).all(-1)
    speckle = (gray[:, 1:-1, 1:-1] - patches.median(-1).values).abs() > 0.1
    assert (speckle & inner).float().mean() < 2e-3
