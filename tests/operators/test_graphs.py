"""Products replayed as CUDA graphs give what ordinary products give."""

import pytest
import torch

import pullback as pb
from helpers.families import images_for, model_of
from pullback.errors import NumericsError, PullbackError
from pullback.operators.execution import CapturedFunction

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def probe():
    model = model_of("dinov2")
    yield pb.load_probe(model.cuda(), "cls", 0)
    model.cpu()


@needs_gpu
@pytest.mark.parametrize("capture", [None, True])
def test_recorded_products_equal_ordinary_ones_for_new_inputs(probe, capture):
    features = probe.features(images_for("dinov2", (3, 3)).cuda())
    ordinary = pb.JacobianOperator(probe, features, capture=False)
    recorded = pb.JacobianOperator(probe, features, capture=capture)
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(5):
        v, w = (
            torch.randn(2, n, 3, generator=generator, device="cuda", dtype=features.dtype)
            for n in (ordinary.cols, ordinary.rows)
        )
        torch.testing.assert_close(recorded @ v, ordinary @ v)
        torch.testing.assert_close(recorded.T @ w, ordinary.T @ w)
    assert recorded._captured


@needs_gpu
def test_a_recording_that_misses_something_is_noticed():
    calls = []

    def forgetful(x):
        calls.append(1)
        return x * (1.0 if len(calls) <= 2 else 2.0)

    with pytest.raises(NumericsError, match="the recorded product differs"):
        CapturedFunction(forgetful, torch.ones(3, device="cuda"))


@needs_gpu
def test_only_linear_decoders_can_be_recorded(probe):
    features = probe.features(images_for("dinov2", (3, 3)).cuda())
    with pytest.raises(PullbackError, match="only products of a probe with a linear decoder"):
        pb.JacobianOperator(lambda x: x.sin(), features, capture=True)
