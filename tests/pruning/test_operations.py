"""Operations by formula are those that torch counts, for every kind of stage, size and family."""

import itertools

import pytest
import torch

import pullback as pb
from helpers.families import SMALL_MODELS, images_for, model_of
from pullback.backbones import load_backbone
from pullback.evaluation.cost import flops
from pullback.learning.head import ImportanceHead
from pullback.pruning.model import PrunedModel, plan_for
from pullback.pruning.operations import PredictedOperations, block_operations, operations
from pullback.registry import BACKBONES

NAMES = [name for name, small in SMALL_MODELS.items() if BACKBONES[small.family].assemble and small.family != "siglip2"]


def predicted(model, images, scores, preset="best", **options):
    """Pairs (by formula, counted) for several plans and sizes."""
    patch = load_backbone(model).patch_size
    template = plan_for(model, preset, 0.5, [min(scores)], **options)
    formula = PredictedOperations(model, images, scores, template)
    short = min(images.shape[-2:])
    stages = [chosen for count in (1, 2) for chosen in itertools.combinations(sorted(scores), count)]
    for chosen, ratio, size in itertools.product(stages, (0.23, 0.7), (None, short - 2 * patch)):
        plan = plan_for(model, preset, ratio, chosen, size=size, **options)
        yield formula(plan), operations(PrunedModel(model, plan, [scores[stage] for stage in chosen]), images)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_of_every_family(name):
    backbone = load_backbone(model_of(name))
    tokens = torch.randn(1, 7, backbone.dim, dtype=torch.float64)
    block = backbone.blocks[0]
    assert block_operations(block, 7) == flops(lambda: block(tokens))
    assert block_operations(block, 7, 1) == flops(lambda: block(tokens, None, 1))


@pytest.mark.parametrize("name", ["dinov2", "dinov2-swiglu", "dinov3", "clip", "vit", "siglip", "depth-v2"])
def test_the_formula_is_within_one_percent_of_the_count(name):
    model, images = model_of(name), images_for(name, (12, 10), batch=1)
    for formula, counted in predicted(model, images, {0: "norm", 1: "norm"}):
        assert formula == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("preset", ["paper", "drop", "bipartite", "strided", "attention-drop"])
def test_of_every_preset(preset):
    model, images = model_of("dinov2"), images_for("dinov2", (12, 10), batch=1)
    score = {"bipartite": "bipartite", "strided": "strided", "attention-drop": "class-attention"}.get(preset, "norm")
    if preset == "paper":
        score = pb.SpectralPullbackNetwork(24, rank=3, width=16, heads=4).double().eval()
    for formula, counted in predicted(model, images, {0: score, 1: score}, preset):
        assert formula == pytest.approx(counted, rel=0.01)


def test_with_an_importance_head_and_the_class_row():
    model, images = model_of("dinov2"), images_for("dinov2", (12, 12), batch=1)
    head = ImportanceHead(24, 16, 4).double()
    for formula, counted in predicted(model, images, {1: head}, output="cls"):
        assert formula == pytest.approx(counted, rel=0.01)


def test_pixels_that_fill_no_patch_are_left_out():
    pruned = pb.prune(model_of("dinov2"), "norm", ratio=0.5, stages=[0])
    images = torch.randn(1, 3, 70, 75, dtype=torch.float64)
    assert operations(pruned, images) == operations(pruned, images[..., :70])
