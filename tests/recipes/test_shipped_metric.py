"""The metric of `tiny-scenes` that comes with the package: it orders scenes as their depth does."""

import numpy as np
import pytest
import torch

import pullback as pb
from pullback.evaluation.retrieval import retrieval_scores
from pullback.learning.distilled_metric import pairwise_distances
from pullback.retrieval.baselines import KINDS, feature_distances
from pullback.runs.provenance import weights_hash
from pullback.scenes.splits import QUERIES

NAME = "tiny-scenes-drm"


@pytest.fixture(scope="module")
def probe() -> pb.ProbeMap:
    return pb.load_probe("tiny-scenes", "depth", layer=8, device="cpu")


@pytest.fixture(scope="module")
def metric() -> pb.DistilledMetric:
    return pb.DistilledMetric.from_pretrained(NAME)


def test_it_was_made_for_the_weights_that_come_with_the_package(probe, metric):
    origin = metric.config.origin
    metric.check("metric", family="tiny-scenes", layer=8, weights=weights_hash(probe.backbone.model))
    assert (metric.config.model, origin.decoder, origin.resolutions) == ("tiny-scenes", "depth", ((224, 224),))
    assert origin.decoder_identity == probe.identity["decoder_identity"]


def test_it_orders_scenes_that_nothing_was_trained_on_better_than_features_do(probe, metric):
    images = pb.normalised(pb.render(range(QUERIES + 500, QUERIES + 516)).rgb[:, 0])
    features = probe.features(images, normalized=True)
    with torch.no_grad():
        outputs, items = probe(features), metric(features)
        predicted = {"drm": pairwise_distances(items, items)}
    truth = pb.output_distances(outputs, outputs, "relative_l1")
    itself, layout = torch.eye(len(truth), dtype=torch.bool), probe.token_layout(features)
    predicted |= {kind: feature_distances(features, features, kind, layout=layout) for kind in KINDS}
    rho = {
        name: retrieval_scores(
            distances, truth, leave_out=itself, neighbours=(5,), generator=np.random.default_rng(0)
        ).spearman_pairs
        for name, distances in predicted.items()
    }
    assert rho["drm"] > 0.8
    assert 1 - rho["drm"] < (1 - max(rho[kind] for kind in KINDS)) / 2


def test_a_gallery_takes_it_by_its_name(tmp_path):
    gallery = pb.Gallery.create(tmp_path / "gallery", NAME)
    assert gallery.info()["layer"] == 8 and len(gallery) == 0
