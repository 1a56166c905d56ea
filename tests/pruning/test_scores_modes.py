"""The paper's rule with a Spectral Pullback Network: one prediction for scores and distances."""

import pytest
import torch

import pullback as pb
from helpers.families import images_for, model_of
from pullback.backbones import load_backbone
from pullback.errors import ModelError, PullbackError
from pullback.learning.head import ImportanceHead
from pullback.pruning import preset, run_pruned
from pullback.targets.origin import Origin


def importance_of(spn):
    return lambda tokens, context: spn(tokens).importance()


def modes_of(spn):
    def modes(tokens, context):
        metric = spn(tokens)
        return metric.energies.sqrt()[..., None, None] * metric.modes

    return modes


@pytest.fixture(scope="module")
def spn():
    torch.manual_seed(0)
    return pb.SpectralPullbackNetwork(24, rank=3, width=16, heads=4).double().eval()


def test_an_spn_scores_by_the_importance_of_its_metric_and_matches_by_its_modes(spn):
    backbone, images = load_backbone(model_of("dinov2")), images_for("dinov2", (3, 3))
    plan = preset("paper", 0.4, [0, 1])
    own = run_pruned(backbone, images, plan, [spn], layers=[2])
    written = run_pruned(backbone, images, plan, [importance_of(spn)], layers=[2], modes=modes_of(spn))
    torch.testing.assert_close(own.taps[0], written.taps[0])
    for ours, theirs in zip(own.records, written.records, strict=True):
        assert torch.equal(ours.partner, theirs.partner)


def test_a_head_that_scores_and_an_spn_that_measures(spn):
    backbone, images = load_backbone(model_of("dinov2")), images_for("dinov2", (3, 3))
    head = ImportanceHead(24, 16, 4).double()
    plan = preset("paper", 0.4, [1])
    own = run_pruned(backbone, images, plan, [head], layers=[2], modes=spn)
    written = run_pruned(backbone, images, plan, [head], layers=[2], modes=modes_of(spn))
    torch.testing.assert_close(own.taps[0], written.taps[0])


def test_a_head_alone_cannot_measure():
    with pytest.raises(PullbackError, match=r"modes: matching by d_task .* score with a SpectralPullbackNetwork"):
        pb.prune(model_of("dinov2"), ImportanceHead(24, 16, 4), ratio=0.4, stages=[1], preset="paper")


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: pb.SpectralPullbackNetwork(32, rank=3, width=16, heads=4), "for tokens of width 24, got width 32"),
        (lambda: made_for(layer=2), "it was trained for layer 2, and is used with layer 1"),
        (lambda: made_for(family="clip"), "it was trained for family clip, and is used with family dinov2"),
        (lambda: pb.SpectralPullbackNetwork(24, rank=3, width=16, heads=4, latent=(4, 8)), "a network with a latent"),
        (lambda: ImportanceHead(24, 16, 4), "got ImportanceHead, which predicts no modes"),
    ],
)
def test_a_network_of_something_else_does_not_measure(network, message):
    with pytest.raises(ModelError, match=f"modes: .*{message}"):
        pb.prune(model_of("dinov2"), "norm", ratio=0.4, stages=[1], preset="paper", modes=network())


def made_for(**origin):
    return pb.SpectralPullbackNetwork(24, rank=3, width=16, heads=4).describe(origin=Origin(**origin))


def test_the_papers_rule_is_saved_with_its_network(spn, tmp_path):
    images = images_for("dinov2", (3, 3))
    fast = pb.prune(model_of("dinov2"), spn, ratio=0.4, stages=[0, 1], preset="paper")
    again = pb.PrunedModel.from_pretrained(fast.save_pretrained(tmp_path), model=model_of("dinov2")).double()
    torch.testing.assert_close(again(images).pooler_output, fast(images).pooler_output, rtol=1e-4, atol=1e-4)
    assert again.plan == fast.plan
    ours = sum(parameter.numel() for parameter in again.parameters())
    assert ours == sum(parameter.numel() for parameter in fast.parameters()), "one network, not a copy for each use"
    assert again.modes.networks["0"] is again.modes.networks["1"] is again.scores[0].head is again.scores[1].head
