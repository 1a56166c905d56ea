"""The law on the real DINOv2 ViT-S/14, in float32."""

import pytest
import torch
import transformers as tf

import pullback as pb
from pullback.operators import JacobianOperator

pytestmark = pytest.mark.weights("models/dinov2-small")


@pytest.fixture(scope="module")
def folder(shared):
    return shared / "models" / "dinov2-small"


@pytest.mark.parametrize("size", [(224, 224), (224, 294)], ids=["224", "224x294"])
@pytest.mark.parametrize("decoder", ["cls", "mean"])
def test_decoding_the_features_of_a_layer_gives_transformers_own_forward(folder, decoder, size):
    images = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = tf.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()(images).last_hidden_state
    expected = tokens[:, 0] if decoder == "cls" else tokens[:, 1:].mean(1)
    for layer in (2, 10, 11):
        probe = pb.load_probe(folder, decoder, layer, device="cpu")
        torch.testing.assert_close(probe(probe.features(images)), expected, rtol=1e-5, atol=1e-4)


def test_float32_products_at_a_late_layer_agree_with_autodiff(folder):
    probe = pb.load_probe(folder, "cls", 10, device="cpu")
    features = probe.features(torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1)))
    by_hand, by_autodiff = JacobianOperator(probe, features), JacobianOperator(probe.bind(features), features)
    v = torch.randn(1, by_hand.cols, 2, generator=torch.Generator().manual_seed(2))
    w = torch.randn(1, by_hand.rows, 2, generator=torch.Generator().manual_seed(3))
    for got, expected in ((by_hand @ v, by_autodiff @ v), (by_hand.T @ w, by_autodiff.T @ w)):
        assert (got - expected).norm() / expected.norm() < 1e-5
