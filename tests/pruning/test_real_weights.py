"""Pruned copies of the real DINOv2 ViT-S/14 on real images."""

import numpy as np
import pytest
import torch

import pullback as pb
from pullback.evaluation import cosine_degradation
from pullback.learning.head import ImportanceHead

pytestmark = pytest.mark.weights("models/dinov2-small", "data/imagenet_val/heldout")


@pytest.fixture(scope="module")
def model_and_images(shared):
    probe = pb.load_probe(shared / "models" / "dinov2-small", decoder="cls", device="cpu")
    return probe.backbone.model, probe.load_images(shared / "data" / "imagenet_val" / "heldout", limit=16)


@pytest.mark.parametrize("score", ["norm", "class-attention"])
def test_best_loses_less_than_merging_and_dropping(model_and_images, score):
    model, images = model_and_images
    with torch.no_grad():
        whole = model(images).pooler_output
        lost = {}
        for preset in ("best", "bipartite", "drop"):
            own = "bipartite" if preset == "bipartite" else score
            fast = pb.prune(model, own, ratio=0.5, stages=[6], preset=preset)
            lost[preset] = cosine_degradation(fast(images).pooler_output, whole).mean().item()
    assert lost["best"] < 0.6 * lost["bipartite"] and lost["best"] < 0.6 * lost["drop"]
    assert 0.1 < lost["best"] < 2


def test_onnx_runtime_keeps_the_same_tokens(model_and_images, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra pullback[onnx]")
    pytest.importorskip("onnxscript", reason="needs the extra pullback[onnx]")
    model, images = model_and_images
    torch.manual_seed(0)
    fast = pb.prune(
        model, ImportanceHead(384).start_from(probed(model, images), torch.ones(1, 1)), ratio=0.5, stages=[6]
    )
    session = onnxruntime.InferenceSession(pb.export_onnx(fast, tmp_path / "fast.onnx", size=224))
    with torch.no_grad():
        output, run = fast.with_record(images)
    embedding, kept = session.run(None, {"pixel_values": images.numpy()})
    np.testing.assert_array_equal(kept, run.records[-1].kept.numpy())
    np.testing.assert_allclose(embedding, output.pooler_output.numpy(), rtol=1e-4, atol=1e-4)


def probed(model, images):
    with torch.no_grad():
        return pb.load_probe(model, "cls", 6).features(images)
