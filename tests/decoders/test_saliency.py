"""The saliency head, and the folder in which it comes: backbone/ and decoder.safetensors."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import pullback as pb
from helpers.families import images_for, model_of, random_normal, randomized
from pullback.decoders import SaliencyHead
from pullback.errors import DecoderError, ModelError
from pullback.operators import JacobianOperator

ON_CPU = dict(device="cpu", dtype=torch.float64)


@pytest.fixture(scope="module")
def head() -> SaliencyHead:
    return randomized(SaliencyHead(24))


@pytest.fixture
def folder(tmp_path, head):
    model_of("dinov2").save_pretrained(tmp_path / "backbone")
    # published without the batch counters, which evaluation does not use
    state = {key: value for key, value in head.state_dict().items() if not key.endswith("num_batches_tracked")}
    save_file(state, tmp_path / "decoder.safetensors")
    return tmp_path


def written_out(state: dict, x: torch.Tensor) -> torch.Tensor:
    """The published head in plain functions."""
    for index in (1, 2, 3):
        x = F.conv_transpose2d(x, state[f"upconv{index}.weight"], state[f"upconv{index}.bias"], stride=2, padding=1)
        mean, var, weight, bias = (
            state[f"bn{index}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        x = ((x - mean) / (var + 1e-5).sqrt() * weight + bias).clamp_min(0)
    return F.conv2d(x, state["final_conv.weight"], state["final_conv.bias"])[:, 0]


def test_the_head_is_three_doublings_and_a_projection(head):
    x = random_normal(2, 24, 2, 3)
    out = head(x)
    assert out.shape == (2, 16, 24)
    torch.testing.assert_close(out, written_out(head.state_dict(), x))


@pytest.mark.parametrize("grid", [(2, 3), (3, 3)], ids=["2x3", "3x3"])
def test_the_law_holds_at_every_layer_of_a_folder(folder, head, grid):
    images = images_for("dinov2", grid)
    with torch.no_grad():
        patches = model_of("dinov2")(images).last_hidden_state[:, 1:]
    expected = written_out(head.state_dict(), patches.unflatten(1, grid).permute(0, 3, 1, 2))
    for layer in range(3):
        probe = pb.load_probe(folder, "saliency", layer, **ON_CPU)
        torch.testing.assert_close(probe(probe.features(images)), expected, rtol=1e-9, atol=1e-9)


def test_products_agree_with_finite_differences_and_are_adjoint(folder):
    probe = pb.load_probe(folder, "saliency", 1, **ON_CPU)
    features = probe.features(images_for("dinov2", (2, 3)))
    operator = JacobianOperator(probe, features)
    direction, step = random_normal(*features.shape), 1e-6
    moved = (probe(features + step * direction) - probe(features - step * direction)).flatten(1) / (2 * step)
    v = direction.flatten(1)[..., None]
    torch.testing.assert_close((operator @ v)[..., 0], moved, rtol=1e-5, atol=1e-6 * float(moved.abs().max()))
    w = random_normal(2, operator.rows, 1, seed=1)
    torch.testing.assert_close((w * (operator @ v)).sum((1, 2)), ((operator.T @ w) * v).sum((1, 2)))


def test_the_folder_also_serves_other_decoders(folder):
    probe = pb.load_probe(folder, "cls", 1, **ON_CPU)
    assert probe.backbone.name == str(folder / "backbone")


def test_a_folder_without_the_head_is_refused(folder):
    (folder / "decoder.safetensors").unlink()
    with pytest.raises(DecoderError, match=r"decoder: 'saliency' needs .*decoder.safetensors, which is not there"):
        pb.load_probe(folder, "saliency", 1, **ON_CPU)


def test_a_folder_with_only_the_head_is_refused(folder, tmp_path):
    (folder / "backbone" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config.json"):
        pb.load_probe(folder, "saliency", 1, **ON_CPU)


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_a_head_that_does_not_fit_is_refused(folder, change):
    state = load_file(folder / "decoder.safetensors")
    if change == "missing":
        del state["bn2.weight"]
    elif change == "extra":
        state["bn9.weight"] = torch.zeros(1)
    else:
        state["upconv1.weight"] = state["upconv1.weight"][:-1].clone()
    save_file(state, folder / "decoder.safetensors")
    with pytest.raises(DecoderError, match=r"decoder: .*decoder.safetensors does not fit the saliency head"):
        pb.load_probe(folder, "saliency", 1, **ON_CPU)


def test_a_truncated_head_is_refused(folder):
    whole = (folder / "decoder.safetensors").read_bytes()
    (folder / "decoder.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DecoderError, match=r"decoder: .*decoder.safetensors does not fit the saliency head"):
        pb.load_probe(folder, "saliency", 1, **ON_CPU)
