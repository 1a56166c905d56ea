"""Scores of tokens for pruning, against the dense Jacobian of a forward that is written out here."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import pullback as pb
from helpers.families import images_for, model_of, random_normal
from pullback.backbones import Backbone
from pullback.errors import DecoderError, PullbackError, RankError, ShapeError
from pullback.geometry import scores as token_scores
from pullback.geometry.scores import (
    block_energies,
    exact_block_norms,
    exact_importance,
    exact_modes,
)
from pullback.operators import DenseOperator, differentiable_attention
from pullback.probes import ProbeMap
from pullback.tokens import TokenLayout

GRID = (2, 3)
LAYER, RANK = 0, 5
CLASS_TOKEN = ["dinov2", "dinov2-registers", "dinov3-gated", "clip", "deit"]


@dataclass(frozen=True)
class Stage:
    """The fields of a pruning context that scores read."""

    layer: int
    layout: TokenLayout
    positions: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)


def stage(probe: ProbeMap, images: Tensor, layer: int = LAYER, below: tuple[int, ...] = ()) -> tuple[Tensor, Stage]:
    """F^layer of the whole sequence and where it stands."""
    tokens = probe.backbone.features(images, [*below, layer])
    layout = probe.backbone.token_layout(images)
    places = torch.arange(layout.tokens).expand(len(images), -1)
    return tokens[layer], Stage(layer, layout, places, {each: tokens[each] for each in below})


def pruned(tokens: Tensor, here: Stage, keep: list[list[int]]) -> tuple[Tensor, Stage]:
    """The tokens at the places ``keep``, other ones for each sample."""
    places = torch.tensor(keep)
    kept = tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[2]))
    return kept, Stage(here.layer, here.layout, places)


def class_token(backbone: Backbone, here: Stage, sample: int):
    """F^l -> the normalised class token, by the backbone's own public run."""

    def function(tokens: Tensor) -> Tensor:
        places = here.positions[sample : sample + 1]
        last = backbone.run(tokens[None], here.layer + 1, backbone.depth, layout=here.layout, positions=places)
        return backbone.norm(last)[0, 0]

    return function


def dense(function, tokens: Tensor) -> Tensor:
    """J [M, N, D] of one sample."""
    with differentiable_attention():
        jacobian = torch.func.jacrev(function)(tokens)
    return jacobian.reshape(-1, *tokens.shape)


def importance(jacobian: Tensor, rank: int) -> Tensor:
    """imp* [N] by a plain SVD."""
    _, values, right = torch.linalg.svd(jacobian.flatten(1), full_matrices=False)
    return (values[:rank, None, None] * right[:rank].unflatten(1, jacobian.shape[1:])).square().sum((0, 2)).sqrt()


def task_blocks(factors: Tensor) -> Tensor:
    """sum_j sigma_j^2 v_j^(t) v_j^(t)T [N, D, D] of factors [r, N, D]: what d_task sees, free of signs and order."""
    return torch.einsum("rnd,rne->nde", factors, factors)


def close(found: Tensor, expected: Tensor, rtol: float = 1e-8) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol * expected.abs().max().item())


def agree(probe: ProbeMap, tokens: Tensor, here: Stage, jacobians: list[Tensor]) -> None:
    close(exact_importance(probe, RANK)(tokens, here), torch.stack([importance(j, RANK) for j in jacobians]))
    norms = torch.stack([j.square().sum((0, 2)).sqrt() for j in jacobians])
    close(exact_block_norms(probe)(tokens, here), norms)
    modes = exact_modes(probe, RANK)(tokens, here)
    assert modes.shape == (len(tokens), RANK, *tokens.shape[1:])
    for factors, jacobian in zip(modes, jacobians, strict=True):
        _, values, right = torch.linalg.svd(jacobian.flatten(1), full_matrices=False)
        truth = (values[:RANK, None] * right[:RANK]).unflatten(1, jacobian.shape[1:])
        close(task_blocks(factors), task_blocks(truth))


@pytest.mark.parametrize("name", CLASS_TOKEN)
def test_scores_of_the_whole_sequence_are_those_of_the_dense_jacobian(name):
    probe = pb.load_probe(model_of(name), "cls", LAYER)
    tokens, here = stage(probe, images_for(name, GRID))
    agree(probe, tokens, here, [dense(class_token(probe.backbone, here, i), tokens[i]) for i in range(2)])


@pytest.mark.parametrize("name", CLASS_TOKEN)
def test_scores_of_a_pruned_sequence_are_those_of_what_is_left(name):
    """With rotary positions (dinov3) a wrong place of a kept token would change every number."""
    probe = pb.load_probe(model_of(name), "cls", LAYER)
    tokens, here = stage(probe, images_for(name, GRID))
    first = here.layout.prefix
    keep = [[*range(first), first + 1, first + 4], [*range(first), first + 2, first + 5]]
    tokens, here = pruned(tokens, here, keep)
    agree(probe, tokens, here, [dense(class_token(probe.backbone, here, i), tokens[i]) for i in range(2)])


def test_a_pruned_sequence_is_not_scored_as_the_whole_one():
    probe = pb.load_probe(model_of("dinov2"), "cls", LAYER)
    tokens, here = stage(probe, images_for("dinov2", GRID))
    places = [[0, 2, 3, 6]] * 2
    whole = exact_importance(probe, RANK)(tokens, here)[:, places[0]]
    alone = exact_importance(probe, RANK)(*pruned(tokens, here, places))
    assert ((alone / whole - 1).abs() > 1e-3).all()


def test_the_probe_is_taken_to_the_layer_of_the_stage():
    """One score serves every stage: J starts where the tokens are."""
    images = images_for("dinov2", GRID)
    probe = pb.load_probe(model_of("dinov2"), "cls", 2)
    tokens, here = stage(probe, images, layer=1)
    there = pb.load_probe(model_of("dinov2"), "cls", 1)
    close(exact_importance(probe, RANK)(tokens, here), exact_importance(there, RANK)(tokens, here), rtol=1e-14)
    first = exact_importance(probe, RANK)(*stage(probe, images, layer=0))
    assert not torch.allclose(first, exact_importance(probe, RANK)(tokens, here), rtol=1e-2)


@pytest.mark.parametrize("read_probe_layer", [True, False])
@pytest.mark.parametrize("name", ["depth-v2", "depth-raw-hooks", "tiny-scenes"])
def test_a_dense_decoder_holds_the_layers_below_the_stage(name, read_probe_layer):
    """Hooks 0, 1, 3, 4; the stage lies on hook 1, so hook 0 is constant and hook 1 follows, unless told otherwise."""
    probe = pb.load_probe(model_of(name), "depth-3x4", 1, read_probe_layer=read_probe_layer)
    backbone = probe.backbone
    tokens, here = stage(probe, images_for(name, GRID), layer=1, below=(0,))

    def function(sample: int):
        def decode(moved: Tensor) -> Tensor:
            taps = {0: here.taps[0][sample : sample + 1], 1: moved[None] if read_probe_layer else tokens[[sample]]}
            taps[3] = backbone.run(moved[None], 2, 4)
            taps[4] = backbone.run(taps[3], 4, 5)
            read = [backbone.norm(tap) if backbone.hooks_normed else tap for tap in taps.values()]
            return probe.decoder.decode(read, here.layout)[0].flatten()

        return decode

    agree(probe, tokens, here, [dense(function(i), tokens[i]) for i in range(2)])


def test_a_dense_decoder_without_its_layers_below_is_refused():
    probe = pb.load_probe(model_of("depth-v2"), "depth-3x4", 3)
    tokens, here = stage(probe, images_for("depth-v2", GRID), layer=3, below=(0,))
    message = r"context\.taps: .* also reads layers \[1\], below the stage at layer 3, .* got layers \[0\]"
    for score in (exact_importance(probe, RANK), exact_block_norms(probe), exact_modes(probe, RANK)):
        with pytest.raises(DecoderError, match=message):
            score(tokens, here)
    without_taps = SimpleNamespace(layer=3, layout=here.layout, positions=here.positions)
    with pytest.raises(DecoderError, match=r"also reads layers \[0, 1\], .* got layers \[\]"):
        exact_importance(probe, RANK)(tokens, without_taps)


def test_a_dense_decoder_has_no_jacobian_at_a_pruned_sequence():
    probe = pb.load_probe(model_of("depth-v2"), "depth-3x4", 0)
    tokens, here = stage(probe, images_for("depth-v2", GRID))
    tokens, here = pruned(tokens, here, [[0, 1, 2], [0, 4, 5]])
    with pytest.raises(DecoderError, match=r"tokens: decoder 'depth-3x4' reads every token, expected all 7 .* got 3"):
        exact_importance(probe, RANK)(tokens, here)


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_an_images_score_does_not_depend_on_its_batch(method, monkeypatch):
    probe = pb.load_probe(model_of("dinov2"), "cls", LAYER)
    tokens, here = stage(probe, images_for("dinov2", GRID, batch=3))
    score = exact_importance(probe, RANK, method=method)
    together = score(tokens, here)
    monkeypatch.setattr(token_scores, "samples_that_fit", lambda *_: 1)
    for i in (2, 0):
        alone = Stage(here.layer, here.layout, here.positions[[i]])
        close(score(tokens[[i]], alone), together[[i]], rtol=1e-10)
    close(score(tokens, here), together, rtol=1e-10)


def test_krylov_reaches_its_tolerance():
    """Looser tolerances stop earlier: the check would fail if rtol did nothing."""
    probe = pb.load_probe(model_of("dinov2"), "cls", LAYER)
    tokens, here = stage(probe, images_for("dinov2", GRID))
    truth = exact_importance(probe, 2, method="exact")(tokens, here)

    def error(rtol: float) -> float:
        found = exact_importance(probe, 2, method="krylov", rtol=rtol)(tokens, here)
        return ((found - truth).norm() / truth.norm()).item()

    assert error(1e-12) < 1e-6
    assert error(1e-12) < error(0.5)


def test_sampled_block_norms_scatter_around_the_exact_ones():
    probe = pb.load_probe(model_of("dinov2"), "cls", LAYER)
    tokens, here = stage(probe, images_for("dinov2", GRID))
    exact = exact_block_norms(probe)(tokens, here)
    few, many = (exact_block_norms(probe, num_probes=count)(tokens, here) for count in (4, 4096))
    assert 0 < (many / exact - 1).abs().max() < 0.06 < (few / exact - 1).abs().max()


@pytest.mark.parametrize("shape", [(7, 24), (70, 24), (130, 140)], ids=["wide", "tall", "several chunks"])
def test_block_energies_are_those_of_the_matrix(shape):
    matrix = random_normal(2, *shape)
    expected = matrix.square().sum(1).unflatten(-1, (4, -1)).sum(-1)
    op = DenseOperator(matrix)
    close(block_energies(op, 4), expected, rtol=1e-13)
    assert op.products.total == min(shape)


def test_wrong_arguments_are_named():
    probe = pb.load_probe(model_of("dinov2"), "cls", LAYER)
    tokens, here = stage(probe, images_for("dinov2", GRID))
    with pytest.raises(PullbackError, match="method: expected one of auto, krylov, paper, exact, got 'svd'"):
        exact_importance(probe, method="svd")
    with pytest.raises(
        PullbackError, match=r"probe: expected a ProbeMap at a layer .* depth layers \[0, 1, 3, 4\] after the norm"
    ):
        exact_modes(pb.multi_layer_probe(model_of("depth-v2")))
    with pytest.raises(ShapeError, match=r"tokens: expected \[B, N, 24\] .* got \[2, 7, 12\]"):
        exact_importance(probe, RANK)(tokens[..., :12], here)
    with pytest.raises(RankError, match="rank: expected 1 <= rank <= 24"):
        exact_importance(probe, 25)(tokens, here)
    blind = pb.load_probe(model_of("dinov2"), lambda tokens: torch.ones_like(tokens[:, 0]) + 0 * tokens[:, 0], LAYER)
    with pytest.raises(DecoderError, match="does not depend on the features"):
        exact_block_norms(blind)(tokens, here)
