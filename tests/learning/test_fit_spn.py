"""Learning the Spectral Pullback Network: its steps, its scores against dense projectors, and the constant subspace."""

import math
from dataclasses import replace

import pytest
import torch

from helpers.toys import (
    DIM,
    RANK,
    TOKENS,
    bent_probe,
    examples_of,
    jacobians,
    linear_probe,
    metric_of,
    normal,
    orthonormal,
    seeded,
    spn_task,
    tiny_spn,
    with_singular_values,
)
from pullback.errors import PullbackError, RankError
from pullback.learning.fit import FitConfig, Share, fit
from pullback.learning.train_spn import (
    ExampleScores,
    RandNLA,
    SpnExamples,
    SpnTask,
    comparison_row,
    constant_network,
    constant_subspace,
    example_scores,
    natural_sensitivity_ratio,
    patch_alignment,
    spn_scores,
)
from pullback.operators import LowRankMetric
from pullback.tokens import TokenLayout

IMAGES = 5


@pytest.fixture
def features() -> torch.Tensor:
    return normal(IMAGES, TOKENS, DIM, seed=21)


@pytest.fixture
def examples(features) -> SpnExamples:
    return examples_of(bent_probe(), features)


def projector(columns: torch.Tensor) -> torch.Tensor:
    """On the span of columns [n, r], dense and by pseudo-inverse."""
    return columns @ torch.linalg.pinv(columns)


def dense_alignment(a: torch.Tensor, b: torch.Tensor) -> float:
    """tr(P_a P_b) / r of the spans of modes [r, N, D]."""
    return torch.trace(projector(a.flatten(1).T) @ projector(b.flatten(1).T)).item() / len(b)


def exact_network(examples: SpnExamples, features: torch.Tensor):
    """The true modes and energies of the features that come along."""

    def network(given: torch.Tensor) -> LowRankMetric:
        rows = [int((features == one).flatten(1).all(1).nonzero()) for one in given]
        return LowRankMetric(examples.modes[rows], examples.singular_values[rows].square())

    return network


# ---- steps


def test_the_mean_loss_of_all_shares_is_the_loss_of_the_batch_so_sketches_do_not_depend_on_the_processes():
    task, network = spn_task(), tiny_spn()
    for step in range(3):
        whole, _ = task.loss(network, step, Share(6), seeded(step))
        parts = [task.loss(network, step, Share(6, rank, 2), seeded(step))[0] for rank in (0, 1)]
        torch.testing.assert_close(torch.stack(parts).mean(), whole, rtol=1e-5, atol=1e-6)
        assert abs(parts[0].item() - parts[1].item()) > 1e-5


def test_every_step_has_other_sketches():
    probe, features = bent_probe(), normal(1, TOKENS, DIM)
    task = SpnTask(lambda rows: features[rows], 1, RandNLA(probe), examples_of(probe, features))
    losses = [task.loss(lambda x: metric_of(len(x)), step, Share(1), seeded(step))[0].item() for step in range(5)]
    assert len(set(losses)) == 5


def test_training_logs_the_alignment_and_the_gradient_signal_and_validation_the_rest(tmp_path):
    task = spn_task()
    logged = []
    fit(
        tiny_spn(),
        task,
        FitConfig(steps=2, batch=4, validate_every=2),
        on_step=lambda step, numbers: logged.append(numbers),
    )
    assert {"loss", "alignment", "gradient_signal_ratio"} <= set(logged[0])
    assert {"v1", "v1_se", "v1_patches", "sensitivity_ratio", "kappa", "score"} <= set(logged[1])
    assert logged[0]["gradient_signal_ratio"] > 1


def test_with_a_probe_validation_measures_the_natural_ratio(features, examples):
    probe, spn = bent_probe(), tiny_spn()
    task = SpnTask(lambda rows: features[rows], IMAGES, RandNLA(probe), examples, batch=2, probe=probe)
    scores = task.validate(spn)
    ratio = natural_sensitivity_ratio(spn, probe, examples)
    assert scores["natural_ratio"] == pytest.approx(ratio.mean().item())
    assert scores["natural_ratio_se"] == pytest.approx(ratio.std().item() / math.sqrt(IMAGES))
    assert "natural_ratio" not in spn_task().validate(spn)


@pytest.mark.parametrize("missing", ["count", "held_out"])
def test_a_task_without_examples_is_refused(features, missing):
    probe = bent_probe()
    held_out = examples_of(probe, features)
    empty = SpnExamples(held_out.features, held_out.modes[:0], held_out.singular_values[:0], held_out.total[:0])
    with pytest.raises(PullbackError, match="count, held_out: expected at least one example of each, got"):
        if missing == "count":
            SpnTask(lambda rows: features[rows], 0, RandNLA(probe), held_out)
        else:
            SpnTask(lambda rows: features[rows], 3, RandNLA(probe), empty)


# ---- scores


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_patch_alignment_is_that_of_the_projectors_without_the_prefix_block(prefix):
    a, b = orthonormal(IMAGES, RANK), orthonormal(IMAGES, RANK, seed=1)
    b = torch.linalg.qr((a + 0.3 * b).flatten(2).mT).Q.mT.unflatten(-1, (TOKENS, DIM))  # neither equal nor unrelated
    expected = [dense_alignment(x[:, prefix:], y[:, prefix:]) for x, y in zip(a, b, strict=True)]
    assert min(expected) > 0.1 and max(expected) < 0.95
    assert patch_alignment(a, b, prefix).tolist() == pytest.approx(expected, abs=1e-5)


def test_every_view_of_a_scene_has_prefix_tokens_of_its_own():
    """Only rows that the layout calls patches count, not all but the first few of the scene."""
    layout = TokenLayout(prefix=2, grid=(1, 2), views=3)
    shape = (IMAGES, RANK, layout.tokens, DIM)
    a, b = (torch.linalg.qr(normal(*shape, seed=seed).flatten(2).mT).Q.mT.unflatten(-1, shape[2:]) for seed in (1, 2))
    b = torch.linalg.qr((a + 0.5 * b).flatten(2).mT).Q.mT.unflatten(-1, shape[2:])
    patches = layout.patch_mask()
    expected = [dense_alignment(x[:, patches], y[:, patches]) for x, y in zip(a, b, strict=True)]
    assert patch_alignment(a, b, layout.prefix, layout.views).tolist() == pytest.approx(expected, abs=1e-5)
    assert patch_alignment(a, b, layout.prefix).tolist() != pytest.approx(expected, abs=1e-3)
    scenes = SpnExamples(
        lambda rows: rows, b, torch.ones(IMAGES, RANK), torch.ones(IMAGES), layout.prefix, layout.views
    )
    found = example_scores(lambda rows: LowRankMetric(a[rows], torch.ones(len(rows), RANK).double()), scenes, batch=2)
    assert found.v1_patches.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("views", [0, 5])
def test_views_that_do_not_divide_the_tokens_are_refused(views):
    modes = orthonormal(1, RANK)
    assert TOKENS % 5
    with pytest.raises(PullbackError, match=f"views: expected a number that divides the {TOKENS} tokens.*got {views}"):
        patch_alignment(modes, modes, 1, views)


def test_modes_that_agree_in_the_prefix_only_have_no_patch_alignment():
    a, b = (torch.zeros(1, 1, TOKENS, DIM) for _ in range(2))
    a[..., 0, 0], b[..., 0, 0] = 0.99, 0.99
    a[..., 1, 0], b[..., 2, 0] = math.sqrt(1 - 0.99**2), math.sqrt(1 - 0.99**2)
    assert (a * b).sum() > 0.98
    assert patch_alignment(a, b, 1).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_the_scores_are_those_of_the_dense_truth_whatever_the_batch(features, examples, batch):
    spn = tiny_spn()
    found = spn_scores(spn, examples, batch=batch)
    metric = spn(features)
    whole, patches, ratio, kappa = [], [], [], []
    for i, jacobian in enumerate(jacobians(bent_probe(), features)):
        right = torch.linalg.svd(jacobian)[2][:RANK].unflatten(1, (TOKENS, DIM))
        modes = metric.modes[i].detach().double()
        whole.append(dense_alignment(modes, right))
        patches.append(dense_alignment(modes[:, 1:], right[:, 1:]))
        spectrum = torch.linalg.svdvals(jacobian).square()
        ratio.append(metric.energies[i].sum().item() / spectrum.sum().item())
        kappa.append((spectrum[:RANK].sum() / spectrum.sum()).item())
    expected = {name: sum(values) / IMAGES for name, values in zip(("v1", "v1_patches"), (whole, patches), strict=True)}
    for name, values in (("v1", whole), ("v1_patches", patches)):
        variance = sum((value - expected[name]) ** 2 for value in values) / (IMAGES - 1)
        expected[f"{name}_se"] = math.sqrt(variance / IMAGES)
    expected |= {"sensitivity_ratio": sum(ratio) / IMAGES, "kappa": sum(kappa) / IMAGES, "score": expected["v1"]}
    assert found == pytest.approx(expected, rel=1e-4)


def test_with_exact_modes_and_energies_the_ratios_are_kappa(features, examples):
    network = exact_network(examples, features)
    scores = spn_scores(network, examples, batch=2)
    assert scores["v1"] == pytest.approx(1) and scores["v1_patches"] == pytest.approx(1, abs=1e-5)
    assert scores["kappa"] < 0.95 and scores["sensitivity_ratio"] == pytest.approx(scores["kappa"], rel=1e-9)
    natural = natural_sensitivity_ratio(network, bent_probe(), examples, batch=2)
    kappa = examples.singular_values.square().sum(1) / examples.total
    torch.testing.assert_close(natural, kappa, rtol=1e-9, atol=0)


# ---- natural energies


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_the_natural_ratio_is_the_share_of_the_jacobian_in_the_predicted_subspace(features, examples, batch):
    spn, probe = tiny_spn(), bent_probe()
    found = natural_sensitivity_ratio(spn, probe, examples, batch=batch)
    modes = spn(features).modes.detach().double()
    for i, jacobian in enumerate(jacobians(probe, features)):
        within = torch.linalg.matrix_norm(jacobian @ projector(modes[i].flatten(1).T)) ** 2
        assert found[i].item() == pytest.approx((within / jacobian.square().sum()).item(), rel=1e-5)
    assert found.shape == (IMAGES,) and not found.requires_grad


def test_the_natural_ratio_never_exceeds_kappa_and_predicted_energies_do_not_enter(features, examples):
    probe = bent_probe()
    kappa = examples.singular_values.square().sum(1) / examples.total
    for seed in range(4):
        metric = metric_of(IMAGES, seed=seed)
        louder = LowRankMetric(metric.modes, 100 * metric.energies)
        ratios = [natural_sensitivity_ratio(lambda x, m=m: m, probe, examples) for m in (metric, louder)]
        assert torch.equal(*ratios) and (ratios[0] < kappa).all()


# ---- the constant subspace


def related_modes(images: int, spread: float) -> torch.Tensor:
    """Modes [images, RANK, N, D] scattered around one subspace."""
    common, own = orthonormal(1, RANK, seed=1), orthonormal(images, RANK, seed=2)
    return torch.linalg.qr((common + spread * own).flatten(2).mT).Q.mT.unflatten(-1, (TOKENS, DIM))


@pytest.mark.parametrize("spread", [0.3, 1.0, 100.0])
def test_the_constant_subspace_is_the_leading_eigenspace_of_the_mean_projector(spread):
    modes = related_modes(20, spread)
    mean = torch.stack([projector(one.flatten(1).T) for one in modes]).mean(0)
    values, vectors = torch.linalg.eigh(mean)
    best = values[-RANK:].sum().item() / RANK
    found = constant_subspace(modes, RANK)
    assert found.shape == (RANK, TOKENS, DIM) and found.dtype == torch.float64
    gram = found.flatten(1) @ found.flatten(1).T
    torch.testing.assert_close(gram, torch.eye(RANK, dtype=torch.float64), rtol=0, atol=1e-8)
    alignment = [dense_alignment(found, one) for one in modes]
    assert sum(alignment) / 20 == pytest.approx(best, rel=1e-3) and best < 0.95
    assert sum(alignment) / 20 > max(sum(dense_alignment(guess, one) for one in modes) / 20 for guess in modes)
    if spread < 1:
        exact = vectors[:, -RANK:].T.unflatten(1, (TOKENS, DIM))
        assert dense_alignment(found, exact) == pytest.approx(1, abs=1e-4)


def test_images_that_share_a_subspace_are_all_aligned_with_it():
    one = orthonormal(1, RANK)[0]
    rotations = torch.linalg.qr(normal(6, RANK, RANK)).Q
    modes = torch.einsum("brs,snd->brnd", rotations, one)
    found = constant_subspace(modes, RANK)
    assert [dense_alignment(found, mode) for mode in modes] == pytest.approx([1] * 6, abs=1e-9)


def test_modes_may_be_stored_in_half_precision():
    modes = related_modes(20, 0.3)
    found = constant_subspace(modes.half(), RANK)
    assert found.dtype == torch.float32
    assert dense_alignment(found.double(), constant_subspace(modes, RANK)) == pytest.approx(1, abs=1e-4)


def test_a_constant_subspace_of_higher_rank_than_all_modes_is_refused():
    with pytest.raises(RankError, match="rank: expected 1 <= rank <= 6"):
        constant_subspace(related_modes(2, 1.0), 7)


def test_the_scores_of_a_constant_are_its_alignments(features, examples):
    subspace = constant_subspace(examples.modes, RANK)
    scores = spn_scores(constant_network(subspace), examples, batch=2)
    whole = [dense_alignment(subspace, mode) for mode in examples.modes]
    patches = [dense_alignment(subspace[:, 1:], mode[:, 1:]) for mode in examples.modes]
    assert scores["v1"] == scores["score"] == pytest.approx(sum(whole) / IMAGES, rel=1e-6)
    assert scores["v1_patches"] == pytest.approx(sum(patches) / IMAGES, rel=1e-5)


def test_for_a_linear_map_the_constant_is_perfect_and_a_trained_network_reaches_it():
    probe = linear_probe(with_singular_values(torch.tensor([4.0, 2.0, 1.0, 0.2])))
    features = normal(30, TOKENS, DIM, seed=4, dtype=torch.float32)
    features = features + 3 * features[:1]  # the network is blind to positions but for what features say of them
    held_out = examples_of(probe, features[24:].double())
    constant = spn_scores(constant_network(constant_subspace(held_out.modes, RANK)), held_out)
    assert constant["v1"] == pytest.approx(1, abs=1e-6)
    held_out = replace(held_out, features=lambda rows: features[24 + rows])
    task = SpnTask(lambda rows: features[rows], 24, RandNLA(probe, 2), held_out, probe=probe)
    config = FitConfig(steps=120, batch=4, learning_rate=5e-3, warmup=10, validate_every=40)
    fitted = fit(tiny_spn(width=32), task, config)
    assert fitted.scores["v1"] > 0.9
    assert fitted.scores["natural_ratio"] == pytest.approx(fitted.scores["kappa"], rel=0.1)


# ---- rows of a comparison


def scores_of(v1: list[float], patches: list[float]) -> ExampleScores:
    return ExampleScores(torch.tensor(v1), torch.tensor(patches), torch.zeros(len(v1)))


def test_a_row_holds_the_paired_lead_with_its_interval():
    """Paired: what all examples have in common cancels, so the interval is narrower than those of the two means."""
    constant = scores_of([0.1, 0.5, 0.9], [0.2, 0.2, 0.2])
    row = comparison_row("ours", scores_of([0.2, 0.6, 1.0], [0.1, 0.2, 0.3]), constant)
    assert row["network"] == "ours" and row["v1"] == pytest.approx(0.6)
    assert row["v1_lead"] == pytest.approx(0.1) and row["v1_lead_half_width"] == pytest.approx(0, abs=1e-6)
    assert row["v1_patches_lead"] == pytest.approx(0, abs=1e-6)
    assert row["v1_patches_lead_half_width"] == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-3), "t with 2 degrees"


def test_a_single_example_has_a_lead_and_no_interval():
    row = comparison_row("ours", scores_of([0.4], [0.4]), scores_of([0.1], [0.5]))
    assert row["v1_lead"] == pytest.approx(0.3) and row["v1_lead_half_width"] is None


def test_the_constant_network_says_the_same_everywhere(features, examples):
    subspace = orthonormal(1, RANK)[0]
    metric = constant_network(subspace)(features)
    assert metric.modes.shape == (IMAGES, RANK, TOKENS, DIM) and torch.equal(metric.modes[1], subspace)
    found = example_scores(constant_network(subspace), examples, batch=2)
    assert found.v1.mean().item() == pytest.approx(spn_scores(constant_network(subspace), examples)["v1"])
