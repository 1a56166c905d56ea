"""The SO(3)-aware metric of cameras against the geodesic angle between rotations, in float64."""

import math

import pytest
import torch

import pullback as pb
from helpers.vggt_models import scenes, tiny
from pullback.errors import DecoderError
from pullback.operators import JacobianOperator
from pullback.vggt.camera_metric import CameraMetric, rotation_factor
from pullback.vggt.network.pose import rotation_matrix


def noise(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got, expected, tolerance=1e-9):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def angle(first, second):
    """Between R(q) and R(q'), [..., 4] each: |R - R'|_F = 2 sqrt(2) sin(theta / 2) is accurate for small angles too."""
    difference = rotation_matrix(first) - rotation_matrix(second)
    return 2 * (torch.linalg.matrix_norm(difference) / math.sqrt(8)).asin()


def quaternions(count=20):
    """Of any length and sign, and some at which coordinates vanish."""
    some = noise(count, 4) * noise(count, 1, seed=1).exp()
    return torch.cat([some, torch.eye(4, dtype=torch.float64), -3 * torch.eye(4, dtype=torch.float64)])


def test_the_rotation_block_is_the_angle_of_finite_differences():
    q = quaternions()
    direction = noise(*q.shape, seed=2) * q.norm(dim=-1, keepdim=True)
    step = 1e-5
    by_differences = angle(q + step * direction, q - step * direction) / (2 * step)
    omega = (direction[:, None] @ rotation_factor(q))[:, 0]
    close(omega.norm(dim=-1), by_differences, 1e-8)


def test_the_rotation_vector_is_the_one_that_turns():
    """dR = [omega]x R, coordinate by coordinate."""
    q, direction = quaternions(), noise(28, 4, seed=3)
    rotation, change = torch.func.jvp(rotation_matrix, (q,), (direction,))
    x, y, z = (direction[:, None] @ rotation_factor(q))[:, 0].unbind(-1)
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).unflatten(-1, (3, 3))
    close(cross @ rotation, change)


def test_the_length_of_a_quaternion_is_the_one_direction_that_does_not_count():
    q = quaternions()
    factor = rotation_factor(q)
    close(q[:, None] @ factor, torch.zeros(len(q), 1, 3, dtype=torch.float64))
    metric = factor @ factor.mT
    length = q.norm(dim=-1)[:, None, None]
    unit = q[..., None] / length
    close(metric, 4 / length**2 * (torch.eye(4, dtype=torch.float64) - unit @ unit.mT))
    assert (torch.linalg.matrix_rank(metric) == 3).all(), "singular: there is no Cholesky factor"


@pytest.mark.parametrize("scale", [-1.0, 0.2, -7.0])
def test_sign_and_length_of_a_quaternion_change_nothing(scale):
    """A network that gave c q instead of q, with c dq, would have the same geometry."""
    q, direction = quaternions(), noise(28, 4, seed=4)
    close((scale * direction)[:, None] @ rotation_factor(scale * q), direction[:, None] @ rotation_factor(q))


def test_views_are_blocks_of_translation_rotation_and_field_of_view():
    poses = noise(2, 3, 9)
    factor = CameraMetric()(poses.flatten(1))
    assert factor.shape == (2, 27, 24)
    metric = (factor @ factor.mT).unflatten(2, (3, 9)).unflatten(1, (3, 9))
    for view in range(3):
        rotation = rotation_factor(poses[:, view, 3:7])
        for sample in range(2):
            own = metric[sample, view, :, view]
            blocks = torch.block_diag(torch.eye(3), rotation[sample] @ rotation[sample].mT, torch.eye(2))
            close(own, blocks)
        others = [other for other in range(3) if other != view]
        assert not metric[:, view][:, :, others].any()


def test_units_weigh_translation_and_field_of_view_against_radians():
    pose, change = noise(1, 9), noise(9, seed=5)
    one, other = (change @ metric(pose)[0] for metric in (CameraMetric(), CameraMetric(10.0, fov_unit=0.5)))
    close(other, one * torch.tensor([0.1] * 3 + [1.0] * 3 + [2.0] * 2, dtype=torch.float64))
    assert CameraMetric(10.0).__name__ == "CameraMetric(translation_unit=10, fov_unit=1)"


def test_a_radian_moves_a_point_at_unit_distance_as_much_as_a_unit_of_translation():
    """What the default units say: |d(R x + T)|^2 = |omega|^2 for |x| = 1 across the axis, and |dT|^2 for any x."""
    q = noise(4)
    omega = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    factor = rotation_factor(q)
    dq = torch.linalg.lstsq(factor.mT, omega[:, None]).solution[:, 0]
    _, change = torch.func.jvp(rotation_matrix, (q,), (dq,))
    across = rotation_matrix(q).mT @ torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    close((change @ across).norm(), (dq @ factor).norm())


def test_the_pullback_of_the_camera_is_that_of_rotation_vectors():
    """J^T H J against the derivative of (T, log of the rotation relative to the base point, field of view)."""
    model = tiny().requires_grad_(False)
    images = scenes(1, 2, 3, 28, 28)
    probe = pb.load_probe(model, "camera", 1, output_metric=pb.CameraMetric())
    features = probe.features(images)
    base = probe(features)

    def physical(tokens):
        poses = probe.bind(features)(tokens)
        relative = rotation_matrix(poses[..., 3:7]) @ rotation_matrix(base[..., 3:7]).mT
        skew = (relative - relative.mT) / 2  # the logarithm, to first order at the identity
        rotation = torch.stack([skew[..., 2, 1], skew[..., 0, 2], skew[..., 1, 0]], -1)
        return torch.cat([poses[..., :3], rotation, poses[..., 7:]], -1)

    operator = JacobianOperator(probe, features)
    expected = JacobianOperator(physical, features.as_subclass(torch.Tensor))
    assert operator.shape == expected.shape == (1, 16, features[0].numel())
    close(operator.dense(), expected.dense())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CameraMetric()(torch.ones(2, 10)), r"CameraMetric expected pose encodings \[B, 9 S\].*got \[2, 10\]"),
        (lambda: CameraMetric()(torch.ones(2, 1, 9)), r"got \[2, 1, 9\]"),
        (lambda: CameraMetric()(torch.zeros(1, 9)), "rotations, got one whose length is zero or not finite"),
        (lambda: rotation_factor(torch.tensor([0.0, math.nan, 0.0, 1.0])), "zero or not finite"),
        (lambda: rotation_factor(torch.tensor([0.0, math.inf, 0.0, 1.0])), "zero or not finite"),
        (lambda: rotation_factor(torch.full((4,), 1e-40)), "zero or not finite"),
        (lambda: CameraMetric(0.0), r"translation_unit: expected a positive number, got 0\.0"),
        (lambda: CameraMetric(fov_unit=math.nan), "fov_unit: expected a positive number"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(DecoderError, match=message):
        call()


@pytest.mark.parametrize("length", [1e-30, 1e-19, 1.0, 1e20, 1e30])
def test_quaternions_of_any_length_in_single_precision(length):
    """Their squares would be outside its range."""
    q = length * quaternions()
    expected = rotation_factor(q)
    got = rotation_factor(q.float()).double()
    assert ((got - expected).norm(dim=(-2, -1)) < 1e-5 * expected.norm(dim=(-2, -1))).all()


@pytest.mark.parametrize("build", [lambda *a, **k: pb.load_probe(*a, 1, **k), pb.multi_layer_probe])
def test_only_cameras_take_the_metric_of_cameras(build):
    """9 points have 27 numbers, as many as three poses."""
    model, metric = tiny().requires_grad_(False), pb.CameraMetric()
    for decoder in ("camera", "camera-1"):
        assert build(model, decoder, output_metric=metric).output_metric is metric
    build(model, "camera", output_metric=metric, pose_derivative="official")
    build(model, "points-9", output_metric=torch.eye(27, dtype=torch.float64))
    for decoder in ("points-9", "depth-3x3"):
        with pytest.raises(DecoderError, match=f"expected decoder 'camera' or 'camera-0' .* got decoder '{decoder}'"):
            build(model, decoder, output_metric=metric)
    with pytest.raises(DecoderError, match="got decoder 'camera' after a task distance"):
        build(model, "camera", output_metric=metric, distance=lambda poses: poses)
