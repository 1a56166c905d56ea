"""Pose encodings, quaternions and unprojection, against the formulas and each other."""

import math

import pytest
import torch

from pullback.errors import ShapeError
from pullback.vggt.network.pose import (
    decode_pose,
    encode_pose,
    invert_extrinsics,
    rotation_matrix,
    unit_quaternion,
    unproject_depth,
)

SIZE = (56, 70)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def encodings(count=50):
    fov = 0.3 + torch.rand(count, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    quaternion = normal(count, 4)
    unit = quaternion / quaternion.norm(dim=-1, keepdim=True)
    return torch.cat([normal(count, 3, seed=2), unit * unit[:, 3:].sign(), fov], -1)


def test_a_rotation_matrix_turns_as_the_quaternion_product_does():
    def product(a, b):
        av, aw, bv, bw = a[..., :3], a[..., 3:], b[..., :3], b[..., 3:]
        vector = aw * bv + bw * av + torch.linalg.cross(av, bv)
        return torch.cat([vector, aw * bw - (av * bv).sum(-1, keepdim=True)], -1)

    q, x = normal(20, 4), normal(20, 3, seed=1)
    conjugate = q * torch.tensor([-1.0, -1, -1, 1])
    turned = product(product(q, torch.cat([x, torch.zeros(20, 1)], -1)), conjugate) / q.square().sum(-1, keepdim=True)
    close((rotation_matrix(q) @ x[..., None])[..., 0], turned[:, :3])


def test_matrices_are_rotations_for_quaternions_of_any_length():
    rotation = rotation_matrix(3 * normal(20, 4))
    close(rotation @ rotation.mT, torch.eye(3, dtype=torch.float64).expand(20, 3, 3))
    close(torch.linalg.det(rotation), torch.ones(20, dtype=torch.float64))


def test_quaternions_survive_the_round_trip_near_every_axis_and_half_turn():
    """Each of the four branches is the well-conditioned one somewhere, half turns (w = 0) included."""
    near = torch.eye(4, dtype=torch.float64).repeat_interleave(8, 0) + 1e-3 * normal(32, 4)
    quaternions = torch.cat([normal(100, 4), near, torch.eye(4, dtype=torch.float64)])
    quaternions = quaternions / quaternions.norm(dim=-1, keepdim=True)
    got = unit_quaternion(rotation_matrix(quaternions))
    assert (got[:, 3] >= 0).all()
    close((got * quaternions).sum(-1).abs(), torch.ones(len(got), dtype=torch.float64))
    close(got[:-4], quaternions[:-4] * quaternions[:-4, 3:].sign())


def test_encoding_and_decoding_are_inverse_to_each_other():
    encoding = encodings()
    extrinsics, intrinsics = decode_pose(encoding, SIZE)
    assert extrinsics.shape == (50, 3, 4) and intrinsics.shape == (50, 3, 3)
    close(encode_pose(extrinsics, intrinsics, SIZE), encoding)
    again = decode_pose(encode_pose(extrinsics, intrinsics, SIZE), SIZE)
    close(again[0], extrinsics)
    close(again[1], intrinsics)


def test_fields_of_view_are_vertical_first_and_the_principal_point_is_the_middle():
    encoding = torch.tensor([0.0, 0, 0, 0, 0, 0, 1, math.radians(90), math.radians(60)], dtype=torch.float64)
    _, intrinsics = decode_pose(encoding, SIZE)
    height, width = SIZE
    focal_y, focal_x = height / 2, width / 2 / math.tan(math.radians(30))
    expected = [[focal_x, 0, width / 2], [0, focal_y, height / 2], [0, 0, 1]]
    close(intrinsics, torch.tensor(expected, dtype=torch.float64))


def test_the_translation_is_that_of_the_camera_not_its_centre():
    encoding = encodings(5)
    extrinsics, _ = decode_pose(encoding, SIZE)
    close(extrinsics[..., 3], encoding[:, :3])
    centre = invert_extrinsics(extrinsics)[:, :3, 3:]
    close(extrinsics[..., :3] @ centre + extrinsics[..., 3:], torch.zeros(5, 3, 1, dtype=torch.float64))


def test_inverted_extrinsics_undo_the_extrinsics():
    extrinsics, _ = decode_pose(encodings(6).unflatten(0, (2, 3)), SIZE)
    bottom = torch.tensor([0.0, 0, 0, 1], dtype=torch.float64).expand(2, 3, 1, 4)
    forward = torch.cat([extrinsics, bottom], -2)
    close(invert_extrinsics(extrinsics) @ forward, torch.eye(4, dtype=torch.float64).expand(2, 3, 4, 4))


def test_unprojected_points_project_back_to_their_pixels_and_depth():
    extrinsics, intrinsics = decode_pose(encodings(4).unflatten(0, (2, 2)), SIZE)
    depth = 1 + torch.rand(2, 2, *SIZE, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    points = unproject_depth(depth, extrinsics, intrinsics)
    assert points.shape == (2, 2, *SIZE, 3)
    inside = points.flatten(2, 3) @ extrinsics[..., :3].mT + extrinsics[..., None, :, 3]
    projected = inside @ intrinsics.mT
    close(projected[..., 2].view_as(depth[..., 0]), depth[..., 0])
    pixels = (projected[..., :2] / projected[..., 2:]).unflatten(2, SIZE)
    v, u = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in SIZE), indexing="ij")
    close(pixels, torch.stack([u, v], -1).expand_as(pixels))


def test_the_decoding_has_derivatives():
    encoding = encodings(2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: decode_pose(x, SIZE), encoding)
    assert torch.autograd.gradcheck(lambda x: unit_quaternion(rotation_matrix(x[:, 3:7])), encoding)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decode_pose(torch.zeros(2, 7), SIZE), r"encoding: expected \[\.\.\., 9\], got \[2, 7\]"),
        (lambda: encode_pose(torch.zeros(4, 4), torch.eye(3), SIZE), r"extrinsics: expected \[\.\.\., 3, 4\]"),
        (lambda: encode_pose(torch.zeros(3, 4), torch.eye(4), SIZE), r"intrinsics: expected \[\.\.\., 3, 3\]"),
        (lambda: rotation_matrix(torch.zeros(3)), r"quaternion: expected \[\.\.\., 4\]"),
        (lambda: unit_quaternion(torch.zeros(3)), r"rotation: expected \[\.\.\., 3, 3\], got \[3\]"),
        (lambda: unproject_depth(torch.zeros(5, 5), torch.zeros(3, 4), torch.eye(3)), "depth: expected .*any, any, 1"),
    ],
)
def test_wrong_shapes_are_refused(call, message):
    with pytest.raises(ShapeError, match=message):
        call()
