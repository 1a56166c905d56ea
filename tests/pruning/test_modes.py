"""The paper's rule with a Spectral Pullback Network: one prediction for scores and distances."""

import pytest
import torch

import pullback as pb
from families import images_for, model_of
from pullback.backbones import load_backbone
from pullback.errors import PullbackError
from pullback.geometry.token_scores import metric_importance, metric_modes
from pullback.learning.head import ImportanceHead
from pullback.pruning import preset, run_pruned


@pytest.fixture(scope="module")
def spn():
    torch.manual_seed(0)
    return pb.SpectralPullbackNetwork(24, rank=3, width=16, heads=4).double().eval()


def test_an_spn_scores_by_the_importance_of_its_metric_and_matches_by_its_modes(spn):
    backbone, images = load_backbone(model_of("dinov2")), images_for("dinov2", (3, 3))
    plan = preset("paper", 0.4, [0, 1])
    own = run_pruned(backbone, images, plan, [spn], layers=[2])
    written = run_pruned(backbone, images, plan, [metric_importance(spn)], layers=[2], modes=metric_modes(spn))
    torch.testing.assert_close(own.taps[0], written.taps[0])
    for ours, theirs in zip(own.records, written.records, strict=True):
        assert torch.equal(ours.partner, theirs.partner)


def test_a_head_that_scores_and_an_spn_that_measures(spn):
    backbone, images = load_backbone(model_of("dinov2")), images_for("dinov2", (3, 3))
    head = ImportanceHead(24, 16, 4).double()
    plan = preset("paper", 0.4, [1])
    own = run_pruned(backbone, images, plan, [head], layers=[2], modes=spn)
    written = run_pruned(backbone, images, plan, [head], layers=[2], modes=metric_modes(spn))
    torch.testing.assert_close(own.taps[0], written.taps[0])


def test_a_head_alone_cannot_measure():
    with pytest.raises(PullbackError, match=r"modes: matching by d_task .* score with a SpectralPullbackNetwork"):
        pb.prune(model_of("dinov2"), ImportanceHead(24, 16, 4), ratio=0.4, stages=[1], preset="paper")


def test_the_papers_rule_is_saved_with_its_network(spn, tmp_path):
    images = images_for("dinov2", (3, 3))
    fast = pb.prune(model_of("dinov2"), spn, ratio=0.4, stages=[0, 1], preset="paper")
    again = pb.PrunedModel.from_pretrained(fast.save_pretrained(tmp_path), model=model_of("dinov2")).double()
    torch.testing.assert_close(again(images).pooler_output, fast(images).pooler_output, rtol=1e-4, atol=1e-4)
    assert again.plan == fast.plan
