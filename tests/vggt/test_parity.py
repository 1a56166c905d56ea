"""Our VGGT against outputs of the published code (shared/specs), under weights made from the parameters' names."""

import json

import pytest
import torch
from safetensors.torch import load_file

from helpers.vggt_models import relative_error, with_recipe
from pullback import VGGT, VGGTConfig
from pullback.vggt.network.patch_embed import PatchViT
from pullback.vggt.network.pose import decode_pose, encode_pose, invert_extrinsics, unproject_depth

LIMIT = 2e-5
VGGT_FILE = "specs/vggt_parity_visible.safetensors"
VIT_FILE = "specs/dinov2_reg_parity_visible.safetensors"
KEYS_FILE = "specs/vggt_1b_keys.json"
CONFIG = VGGTConfig(
    img_size=70,
    patch_embed="conv",
    embed_dim=64,
    num_heads=4,
    dpt_features=32,
    dpt_out_channels=(16, 32, 32, 32),
)
# parameters made so small that the epsilon of every layer norm shows
LOW_AMPLITUDE = {
    r"aggregator\.patch_embed\.proj\.(weight|bias)": 1e-3,
    r"aggregator\.(camera_token|register_token)": 1e-3,
    r"aggregator\..*\.gamma": 1e-3,
    r"aggregator\..*\.attn\.qkv\.(weight|bias)": 3e-3,
    r"camera_head\.token_norm\.(weight|bias)": 3e-3,
    r"camera_head\.poseLN_modulation\.1\.(weight|bias)": 1e-3,
    r"camera_head\.trunk\..*\.gamma": 1e-3,
}
VIT_LOW_AMPLITUDE = {
    r"cls_token|pos_embed|register_tokens": 1e-3,
    r"patch_embed\.proj\.(weight|bias)": 1e-3,
    r".*\.gamma": 1e-3,
}


def everything(model, images):
    """Outputs by the names of the fixture."""
    with torch.no_grad():
        taps = model.aggregator(images)
        output = model(images)
    named = {f"tokens_{layer:02d}": tap for layer, tap in taps.items()}
    named |= {f"pose_enc_{index}": pose for index, pose in enumerate(output.pose_enc_list)}
    return named | {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


def worst_error(got, expected, names):
    return max(relative_error(got[name], expected[name]) for name in names)


@pytest.fixture(scope="module")
def reference(shared):
    return load_file(shared / VGGT_FILE)


@pytest.fixture(scope="module")
def model():
    return with_recipe(VGGT(CONFIG)).eval()


@pytest.mark.weights(VGGT_FILE)
def test_tokens_poses_depth_and_points_are_those_of_the_published_code(reference, model):
    assert sum(p.numel() for p in model.parameters()) == 3_716_088
    got = everything(model, reference["images"])
    layers = [f"tokens_{layer:02d}" for layer in (4, 11, 17, 23)]
    poses = [f"pose_enc_{index}" for index in range(4)]
    maps = ["depth", "depth_conf", "world_points", "world_points_conf"]
    assert worst_error(got, reference, [*layers, *poses, *maps]) < LIMIT
    assert torch.equal(got["pose_enc"], got["pose_enc_3"])


@pytest.mark.weights(VGGT_FILE)
def test_every_epsilon_is_right_where_amplitudes_are_as_small_as_it(reference):
    got = everything(with_recipe(VGGT(CONFIG), LOW_AMPLITUDE).eval(), reference["images"])
    names = [name for name in reference if name.startswith("lowamp_")]
    assert len(names) == 7
    for name in names:
        assert relative_error(got[name.removeprefix("lowamp_")], reference[name]) < LIMIT, name


@pytest.mark.weights(VGGT_FILE)
@torch.no_grad()
def test_the_steps_on_the_way_are_those_of_the_published_code(reference, model):
    trunk, images = model.aggregator, reference["images"]
    start = trunk.embed(images)
    first = trunk.advance(start, 0)
    assert relative_error(start.tokens.unflatten(1, (3, -1))[0], reference["dbg_tokens_in"]) < LIMIT
    assert relative_error(start.tokens.unflatten(1, (3, -1))[0, :, 5:], reference["dbg_patch_tokens"]) < LIMIT
    assert relative_error(first.frame.unflatten(1, (3, -1))[0], reference["dbg_frame0_out"]) < LIMIT
    assert relative_error(first.tokens, reference["dbg_global0_out"]) < LIMIT

    taps = trunk.taps(first)
    for index, raw in enumerate(model.camera_head.rounds(taps[23])):
        assert relative_error(raw, reference[f"dbg_pose_enc_raw_{index}"]) < LIMIT

    head = model.depth_head
    levels = head.levels([taps[layer][0, :, 5:] for layer in (4, 11, 17, 23)], start.layout.grid)
    seen = {}
    hooks = [
        getattr(head.scratch, f"refinenet{index}").register_forward_hook(
            lambda _, __, out, key=f"dbg_depth_refinenet{index}": seen.update({key: out})
        )
        for index in range(1, 5)
    ]
    seen["dbg_depth_output_conv1"] = head.scratch.fuse(levels)
    for hook in hooks:
        hook.remove()
    seen |= {f"dbg_depth_level{index}": level for index, level in enumerate(levels, start=1)}
    assert set(seen) == {name for name in reference if name.startswith("dbg_depth")}
    for name, value in seen.items():
        assert relative_error(value, reference[name]) < LIMIT, name


@pytest.mark.weights(VGGT_FILE)
def test_cameras_and_unprojected_depth_are_those_of_the_published_code(reference):
    size = tuple(reference["images"].shape[-2:])
    extrinsics, intrinsics = decode_pose(reference["geom_pose_enc"], size)
    got = {
        "geom_extrinsics": extrinsics,
        "geom_intrinsics": intrinsics,
        "geom_pose_enc_roundtrip": encode_pose(extrinsics, intrinsics, size),
        "geom_extrinsics_inv": invert_extrinsics(extrinsics),
        "geom_unprojected": unproject_depth(reference["depth"], extrinsics, intrinsics),
    }
    for name, value in got.items():
        assert relative_error(value, reference[name]) < LIMIT, name


@pytest.fixture(scope="module")
def vit_reference(shared):
    return load_file(shared / VIT_FILE)


def vit_outputs(model, images, size):
    with torch.no_grad():
        entering, leaving = model.embed(images), model.encode(images)
        normed = model.norm(leaving)
        patches = model(images)
    return {
        f"tokens_in_{size}": entering,
        f"x_prenorm_{size}": leaving,
        f"x_norm_clstoken_{size}": normed[:, 0],
        f"x_norm_regtokens_{size}": normed[:, 1:5],
        f"x_norm_patchtokens_{size}": patches,
    }


@pytest.mark.weights(VIT_FILE)
@pytest.mark.parametrize("size", ["70x56", "42x70", "56x56"])
def test_the_vit_is_that_of_the_published_code(vit_reference, size):
    model = with_recipe(PatchViT(56, 14, 64, depth=2, heads=4, registers=4))
    for name, value in vit_outputs(model, vit_reference[f"x_{size}"], size).items():
        assert relative_error(value, vit_reference[name]) < LIMIT, name


@pytest.mark.weights(VIT_FILE)
def test_the_epsilons_of_the_vit_are_right_too(vit_reference):
    model = with_recipe(PatchViT(56, 14, 64, depth=2, heads=4, registers=4), VIT_LOW_AMPLITUDE)
    got = vit_outputs(model, vit_reference["x_70x56"], "70x56")
    names = [name for name in vit_reference if name.startswith("lowamp_")]
    assert len(names) == 4
    for name in names:
        assert relative_error(got[name.removeprefix("lowamp_")], vit_reference[name]) < LIMIT, name


@pytest.mark.weights(VIT_FILE)
@pytest.mark.parametrize("size", ["70x56", "42x70", "56x56", "28x28", "28x112", "112x84"])
def test_positions_are_resized_as_in_the_published_code(vit_reference, size):
    model = with_recipe(PatchViT(56, 14, 64, depth=1, heads=4, registers=4))
    rows, columns = (int(side) // 14 for side in size.split("x"))
    with torch.no_grad():
        assert relative_error(model.position_embedding(rows, columns), vit_reference[f"pos_embed_{size}"]) < LIMIT


@pytest.mark.weights(KEYS_FILE)
def test_the_full_size_network_has_the_names_shapes_and_order_of_the_published_checkpoint(shared):
    published = json.loads((shared / KEYS_FILE).read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = VGGT()
    own = {name: list(value.shape) for name, value in model.state_dict().items()}
    assert list(own.items()) == list(published["core"].items())
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == published["meta"]["requires_grad_false"]
