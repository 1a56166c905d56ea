"""The whole network: what it returns, what must not matter (order of views, other scenes, chunks), what it refuses."""

import copy

import pytest
import torch

import pullback as pb
from helpers.vggt_models import TINY, scenes, tiny
from pullback.errors import ImageError, ModelError, ShapeError
from pullback.vggt.network.dpt_head import ResidualUnit, inverse_log
from pullback.vggt.network.grid_embedding import with_positions

TENSORS = ("pose_enc", "depth", "depth_conf", "world_points", "world_points_conf")


@pytest.fixture(scope="module")
def model():
    return tiny().requires_grad_(False)


def close(got, expected, tolerance=1e-9):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


CONFIGURATIONS = {
    "tiny": {},
    "vit": dict(patch_embed="dinov2_vitl14_reg", img_size=56),
    "deep": dict(depth=6, hook_layers=(1, 2, 4, 5)),
    "one-block": dict(depth=1, hook_layers=(0, 0, 0, 0)),
    "camera-above-the-hooks": dict(depth=4, hook_layers=(0, 1, 1, 2)),
    "heads": dict(num_heads=8),
    "no-registers": dict(num_register_tokens=0),
    "patch-8": dict(patch_size=8, patch_embed="dinov2_vitl14_reg", img_size=32),
    "one-round": dict(camera_iterations=1, camera_trunk_depth=1),
    "wide-dpt": dict(dpt_features=24, dpt_out_channels=(4, 8, 12, 16)),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_outputs_have_the_published_names_and_shapes_in_any_configuration(name):
    model = tiny(**CONFIGURATIONS[name])
    patch = model.config.patch_size
    height, width = 2 * patch, 3 * patch
    images = scenes(2, 2, 3, height, width)
    with torch.no_grad():
        output = model(images)
        second = model(images[1])
    shapes = {
        "pose_enc": (2, 2, 9),
        "depth": (2, 2, height, width, 1),
        "depth_conf": (2, 2, height, width),
        "world_points": (2, 2, height, width, 3),
        "world_points_conf": (2, 2, height, width),
    }
    assert {key: tuple(output[key].shape) for key in TENSORS} == shapes
    assert len(output.pose_enc_list) == model.config.camera_iterations
    assert output.images is images and output["depth"] is output.depth
    assert (output.depth > 0).all() and (output.depth_conf > 1).all() and (output.pose_enc[..., 7:] >= 0).all()
    for key in TENSORS:  # several scenes are those scenes one by one, and [S, 3, H, W] is a batch of one
        close(output[key][1:], second[key])


def test_scenes_of_a_batch_do_not_see_each_other(model):
    images = scenes(3, 2, 3, 28, 42)
    together = model(images)
    for index in range(3):
        alone = model(images[index : index + 1])
        for key in TENSORS:
            close(together[key][index], alone[key][0])


def test_views_after_the_first_may_come_in_any_order_but_the_first_is_the_reference(model):
    images = scenes(4, 3, 28, 28)
    order = [0, 3, 1, 2]
    as_given, reordered = model(images), model(images[order])
    swapped = model(images[[1, 0, 2, 3]])
    for key in TENSORS:
        close(reordered[key], as_given[key][:, order])
        assert (swapped[key] - as_given[key][:, [1, 0, 2, 3]]).abs().max() > 1e-4


@pytest.mark.parametrize("chunk_views", [1, 2, 3, 64])
def test_chunks_of_views_change_no_value(model, chunk_views):
    images = scenes(2, 3, 3, 28, 42)
    whole, chunked = model(images, chunk_views=None), model(images, chunk_views=chunk_views)
    for key in TENSORS:
        close(chunked[key], whole[key], 1e-12)


def test_the_dense_heads_take_at_most_so_many_views_at_once(model):
    seen = []
    hook = model.depth_head.scratch.output_conv1.register_forward_hook(lambda _, x, __: seen.append(len(x[0])))
    try:
        model(scenes(2, 5, 3, 14, 14), chunk_views=4)
    finally:
        hook.remove()
    assert seen == [4, 4, 2]


def test_portrait_and_landscape_keep_their_sides(model):
    tall, wide = model(scenes(1, 3, 56, 28)), model(scenes(1, 3, 28, 56))
    assert tall.depth.shape == (1, 1, 56, 28, 1) and wide.depth.shape == (1, 1, 28, 56, 1)


def test_heads_that_are_left_out_are_none_and_their_outputs_absent():
    model = tiny(heads=("camera",))
    assert model.point_head is None and model.depth_head is None
    assert not any(name.startswith(("point_head", "depth_head")) for name in model.state_dict())
    output = model(scenes(2, 3, 28, 28))
    assert set(output) == {"pose_enc", "pose_enc_list", "images"}
    with pytest.raises(AttributeError, match="no output 'depth'; there are pose_enc_list, pose_enc"):
        _ = output.depth


def test_without_a_dense_head_hook_layers_do_not_matter_and_are_not_kept():
    model = pb.VGGT(pb.VGGTConfig(**{**TINY, "heads": ("camera",), "hook_layers": (4, 11, 17, 23)})).eval()
    assert model.config.read_layers == (3,) and model.config.dense_layers == ()
    images = scenes(1, 2, 3, 28, 28, dtype=torch.float32)
    assert set(model.aggregator(images)) == {3} and model(images).pose_enc.shape == (1, 2, 9)
    with pytest.raises(ModelError, match=r"hook_layers=\(4, 11, 17, 23\): expected layers from 0 to 3"):
        pb.VGGTConfig(**{**TINY, "heads": ("camera", "point"), "hook_layers": (4, 11, 17, 23)})


def test_images_are_echoed_in_evaluation_mode_only(model):
    training = copy.deepcopy(model).train()
    assert "images" in model(scenes(1, 3, 14, 14)) and "images" not in training(scenes(1, 3, 14, 14))


def test_under_autocast_only_the_trunk_computes_in_half_precision():
    model = tiny(torch.float32).requires_grad_(False)
    images = scenes(2, 3, 28, 28, dtype=torch.float32)
    dtypes = {}

    def note(name):
        return lambda _, __, out: dtypes.update({name: out.dtype})

    model.aggregator.global_blocks[1].attn.qkv.register_forward_hook(note("trunk"))
    model.camera_head.embed_pose.register_forward_hook(note("camera"))
    model.depth_head.scratch.output_conv1.register_forward_hook(note("depth"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(images)
    assert dtypes == {"trunk": torch.bfloat16, "camera": torch.float32, "depth": torch.float32}
    exact = model(images)
    for key in TENSORS:
        assert output[key].dtype == torch.float32
        assert (output[key] - exact[key]).norm() < 0.1 * exact[key].norm()


def test_a_small_one_can_be_trained():
    torch.manual_seed(0)
    model = pb.VGGT(pb.VGGTConfig(**TINY))
    output = model(scenes(2, 3, 28, 28, dtype=torch.float32))
    (output.pose_enc.sum() + output.depth.log().mean() + output.world_points.mean()).backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    # the confidences have their own channel in a shared convolution, so every parameter is reached
    assert without == []


def test_shapes_can_be_tried_out_on_the_meta_device():
    with torch.device("meta"):
        output = pb.VGGT(pb.VGGTConfig(**TINY)).eval()(torch.empty(2, 3, 294, 518))
    assert output.world_points.shape == (1, 2, 294, 518, 3)


def test_the_skip_of_a_residual_unit_is_rectified_and_its_input_is_left_alone():
    unit = ResidualUnit(4)
    x = torch.randn(1, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    kept = x.clone()
    expected = unit.conv2(unit.conv1(x.relu()).relu()) + x.relu()
    torch.testing.assert_close(unit(x), expected)
    assert torch.equal(x, kept)


def test_points_are_decoded_by_the_inverse_of_the_signed_logarithm():
    points = torch.tensor([-20.0, -1.0, 0.0, 0.5, 300.0], dtype=torch.float64)
    close(inverse_log(points.sign() * points.abs().log1p()), points, 1e-12)


def test_positions_of_a_map_are_pixel_centres_and_span_the_diagonal():
    """Each entry against sin or cos of (coordinate times frequency), written out for an image twice as wide as high."""
    channels, rows, columns, aspect = 8, 2, 4, 2.0
    added = with_positions(torch.zeros(1, channels, rows, columns, dtype=torch.float64), aspect)[0]
    diagonal = 5**0.5
    for row in range(rows):
        for column in range(columns):
            x = aspect / diagonal * ((column + 0.5) / columns * 2 - 1)
            y = 1 / diagonal * ((row + 0.5) / rows * 2 - 1)
            angles = torch.tensor([[x, x / 10], [y, y / 10]], dtype=torch.float64)  # 100^(-1/2) = 1/10
            expected = 0.1 * torch.cat([angles.sin(), angles.cos()], 1).flatten()
            close(added[:, row, column], expected, 1e-12)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 30, 42), "30x42 pixels are not divisible by the patch size 14. Use 28x42"),
        ((2, 3, 0, 42), "0x42 pixels are not divisible"),
        ((2, 4, 28, 28), r"three channels, got \[1, 2, 4, 28, 28\]"),
        ((3, 28, 28), r"expected one scene \[S, 3, H, W\] or several \[B, S, 3, H, W\]"),
        ((0, 3, 28, 28), "at least one view"),
    ],
)
def test_images_that_do_not_fit_are_refused(model, shape, message):
    with pytest.raises(ImageError, match=message):
        model(torch.rand(*shape))


def test_images_of_whole_numbers_are_refused_with_the_conversion(model):
    with pytest.raises(ImageError, match=r"images\.float\(\) / 255"):
        model(torch.zeros(2, 3, 28, 28, dtype=torch.uint8))


def test_heads_refuse_what_is_no_tap(model):
    tap = torch.zeros(1, 2, 7, 64, dtype=torch.float64)
    with pytest.raises(ShapeError, match=r"tap: expected the last layer's tokens \[B, S, P, 64\]"):
        model.camera_head(tap[..., :32])
    with pytest.raises(ShapeError, match="taps: expected 4 of"):
        model.depth_head([tap] * 3, (2, 2))
    with pytest.raises(ShapeError, match="at least 3x3 patches"):
        model.depth_head([tap] * 4, (3, 3))
    for number in (0, 1.5, True, "2"):
        with pytest.raises(ShapeError, match="chunk_views: expected a whole number of views from 1, or None for all"):
            model.depth_head([tap] * 4, (2, 2), chunk_views=number)
    state = model.aggregator.embed(scenes(1, 1, 3, 14, 14))
    with pytest.raises(ModelError, match=r"taps: expected layers \[0, 1, 2, 3\], got \[0\]"):
        model.decode({0: tap}, state.layout)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(depth=3), r"hook_layers=\(0, 1, 2, 3\): expected layers from 0 to 2 \(depth=3\), got 3"),
        (dict(hook_layers=(0, 1, 2, -1)), "got -1"),
        (dict(hook_layers=(0, 1, 2)), "expected 4 of each"),
        (dict(dpt_out_channels=(8, 8)), "expected 4 of each"),
        (dict(dpt_out_channels=(8, 8, 8, 6)), "multiples of 4"),
        (dict(dpt_features=12), "expected a multiple of 8"),
        (dict(num_heads=3), "embed_dim=32, num_heads=3: expected heads of equal width"),
        (dict(embed_dim=36, num_heads=6), "a multiple of 4"),
        (dict(patch_embed="dinov3"), "patch_embed: expected 'dinov2_vitl14_reg' or 'conv', got 'dinov3'"),
        (dict(patch_embed="dinov2_vitl14_reg", img_size=60), "img_size=60: expected a multiple of patch_size=14"),
        (dict(heads=("track",)), "heads: expected a choice of .*, got 'track'"),
        (dict(depth=0), "depth: expected a whole number of at least 1, got 0"),
        (dict(camera_iterations=2.5), "camera_iterations: expected a whole number"),
        (dict(num_register_tokens=-1), "num_register_tokens: expected a whole number of at least 0"),
        (dict(rope_base=0), "rope_base=0: expected"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        pb.VGGTConfig(**{**TINY, **changes})


def test_the_default_hooks_of_a_shallow_network_are_refused_with_the_reason():
    with pytest.raises(ModelError, match="name the four layers that the DPT heads shall read"):
        pb.VGGTConfig(depth=12)


def test_depth_and_points_of_some_views_are_those_of_all_and_cameras_stay(model):
    images, some = scenes(2, 3, 3, 28, 28), torch.tensor([2, 0])
    whole, part = model(images), model(images, dense_views=some)
    close(part.pose_enc, whole.pose_enc)
    for name in ("depth", "depth_conf", "world_points", "world_points_conf"):
        close(part[name], whole[name][:, some])


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([2, 0], r"a tensor \[n\] of int64, got list\. Pass torch\.tensor"),
        (torch.tensor(1), r"got torch\.int64 \[\]"),
        (torch.tensor([0.0]), r"got torch\.float32 \[1\]"),
        (torch.tensor([0, 3]), "one or more views from 0 to 2, got 3"),
        (torch.tensor([-1]), "from 0 to 2, got -1"),
        (torch.tensor([], dtype=torch.int64), "from 0 to 2, got none"),
    ],
)
def test_views_that_are_not_there_are_refused(model, views, message):
    with pytest.raises(ShapeError, match=f"dense_views: expected .*{message}"):
        model(scenes(3, 3, 28, 28), dense_views=views)
