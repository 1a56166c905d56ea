"""ONNX Runtime gives what PyTorch gives: the same kept tokens, the same embedding."""

import copy

import numpy as np
import pytest
import torch

import pullback as pb
from helpers.families import images_for, model_of
from pullback.errors import ModelError, PullbackError
from pullback.learning.head import ImportanceHead
from pullback.pruning.export import embedding_of

pytest.importorskip("onnxruntime", reason="needs the extra pullback[onnx]")
pytest.importorskip("onnxscript", reason="needs the extra pullback[onnx]")


@pytest.mark.parametrize("name", ["dinov2", "clip", "dinov2-classifier"])
def test_sixteen_images(name, tmp_path):
    import onnxruntime

    torch.manual_seed(0)
    model = copy.deepcopy(model_of(name)).float()
    fast = pb.prune(model, ImportanceHead(24, 16, 4), ratio=0.5, stages=[0, 1])
    images = images_for(name, (3, 3), batch=16).float()
    path = pb.export_onnx(fast, tmp_path / "fast.onnx", size=images.shape[-1])
    session = onnxruntime.InferenceSession(path)
    with torch.no_grad():
        output, run = fast.with_record(images)
    for batch in (1, 16):
        first = "logits" if "classifier" in name else "image_embedding"
        embedding, kept = session.run([first, "kept_tokens"], {"pixel_values": images[:batch].numpy()})
        np.testing.assert_array_equal(kept, run.records[-1].kept[:batch].numpy())
        np.testing.assert_allclose(embedding, embedding_of(output)[:batch].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [lambda: model_of("dinov2"), lambda: "dinov2", lambda: None])
def test_what_is_not_pruned_is_not_exported(make, tmp_path):
    with pytest.raises(ModelError, match=r"pruned: expected what pb.prune returned, got (Dinov2Model|str|NoneType)"):
        pb.export_onnx(make(), tmp_path / "fast.onnx", size=42)


def test_a_dense_model_is_not_exported(tmp_path):
    depth = pb.prune(model_of("depth-v2"), "norm", ratio=0.5, stages=[1])
    with pytest.raises(PullbackError, match=r"expected a class-token model, got .* reads all tokens"):
        pb.export_onnx(depth, tmp_path / "depth.onnx", size=42)


def test_a_dense_model_has_no_embedding():
    depth = pb.prune(model_of("depth-v2"), "norm", ratio=0.5, stages=[1])
    with pytest.raises(PullbackError, match="expected an embedding of the image, got DepthEstimatorOutput"):
        embedding_of(depth(images_for("depth-v2", (3, 3))))
