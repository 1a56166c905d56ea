"""Networks behind a bottleneck as an experiment: the latent's Jacobians against products and dense algebra, verdicts on
rows made by hand, and one small run."""

import pytest
import torch

from helpers.finished import Known, cut_down, finished, judged, lines, rows_file, run
from pullback.experiments.experiment import Place
from pullback.experiments.scales import SCALES
from pullback.experiments.spn_training import (
    CONSTANT,
    GAP,
    LEAD,
    QUICK,
    QUICK_FROM_CONSTANT,
    RANK,
    SHARE,
    SPECTRAL,
    TARGET,
    UNTRAINED,
    V1,
    network_of,
    scores,
)
from pullback.experiments.spn_vae import (
    COMPRESSED,
    DELTA,
    HELD,
    K20,
    KEPT,
    LATENT,
    OF_PAPER,
    OURS,
    PAPERS,
    R_EFF,
    READ,
    READ_THROUGH,
    RHO,
    SPECTRUM,
    SPN_VAE,
    UNPUBLISHED,
    VARIANTS,
    columns_of,
    ground,
)
from pullback.experiments.workshop import Workshop
from pullback.learning.bottleneck import latent_probe
from pullback.learning.s2vae import S2VAE
from pullback.operators import JacobianOperator
from pullback.probes import INPUTS
from pullback.runs.progress import Progress

FEW = {
    "size": 28, "cells": 5, "dense": 2, "quality": 3, "agreement": 2, "train": 4, "images": 3, "spn steps": 3,
    "spn batch": 2, "spn width": 16, "spn seeds": 1, "constant pictures": 3,
}  # fmt: skip
RUN = (CONSTANT, UNTRAINED, QUICK, SPECTRAL, QUICK_FROM_CONSTANT)
MINE = cut_down(
    SPN_VAE,
    lambda cell: cell.model == "tiny-scenes" and (cell.key.partition(": ")[2] in {own.row for own in RUN}
                                                  or not cell.key.startswith(OURS)),
    **FEW,
)  # fmt: skip
DEPTH = "tiny-scenes depth"


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return Workshop(MINE, SCALES["tiny"], tmp_path_factory.mktemp("spn-vae"), torch.device("cpu"), Progress())


@pytest.mark.parametrize("scale", SCALES)
def test_every_number_of_the_paper_has_its_place_and_says_why_it_is_absent(scale) -> None:
    cells = {place: cell for cell in SPN_VAE.checked_cells(SCALES[scale]) for place in cell.places}
    for variant, value in OF_PAPER.items():
        place = Place(PAPERS, variant.row, V1)
        assert SPN_VAE.paper[place] == value
        assert UNPUBLISHED in str(SCALES[scale].why_absent(cells[place]))
    for place in (Place(OURS, own.row, column) for own in VARIANTS for column in columns_of(own)):
        assert SCALES[scale].why_absent(cells[place]) is None


# The latent


def test_held_jacobians_are_those_of_depth_after_the_decoder_of_the_vae(shop) -> None:
    own = ground(shop)
    assert own.points is not None and own.jacobians is not None and own.points.shape[1:] == (32, 128)
    plain, through = (
        shop.probe("tiny-scenes", "depth-5x5", INPUTS),
        shop.probe("tiny-scenes", "depth-5x5@s2vae", INPUTS),
    )
    vae = through.decoder.vae
    assert isinstance(vae, S2VAE)
    latent = latent_probe(plain, vae, space="ambient")
    pictures = shop.images("scenes-train", 4, model="tiny-scenes", size=28)
    z = latent.features(pictures[:2], normalized=True)
    torch.testing.assert_close(z.as_subclass(torch.Tensor), own.points[:2])
    direction = torch.randn(2, 4096, 1, generator=torch.Generator().manual_seed(0))
    truth = JacobianOperator(latent, z) @ direction
    torch.testing.assert_close(own.jacobians[:2] @ direction, truth, rtol=1e-3, atol=1e-4 * float(truth.abs().max()))


def test_numbers_of_a_network_are_those_of_its_dense_metric(shop) -> None:
    own = ground(shop)
    assert own.judging is not None and own.held_out.inputs is not None
    found = scores(shop, lambda: own, own.name, SPECTRAL)
    with torch.no_grad():
        metric = network_of(shop, own, SPECTRAL, 0)(own.held_out.inputs(torch.arange(3)))
    assert metric.modes.shape[1:] == (RANK, 32, 128)
    for number, jacobian in enumerate(own.judging.double()):
        _, values, modes = torch.linalg.svd(jacobian, full_matrices=False)
        basis = metric.modes[number].flatten(1).double().T
        share = (jacobian @ basis).square().sum() / values[:RANK].square().sum()
        assert float(found["v1"][number]) == pytest.approx(
            float((modes[:RANK] @ basis).square().sum() / RANK), abs=1e-3
        )
        assert float(found["share"][number]) == pytest.approx(float(share), rel=1e-2, abs=1e-4)
    assert "patches" not in found


# Verdicts

SPREAD, AHEAD, BEHIND = 0.005, (0.05, 0.04, 0.06), (-0.05, -0.06, -0.04)


def around(value: float) -> Known:
    return (value, value - SPREAD, value + SPREAD)


def rows_with(changes: dict[tuple[str, str, str], Known] | None = None):
    """Rows of the embedded model on which every claim holds, apart from what is changed."""
    values = lines(OURS, (V1, SHARE), {CONSTANT.row: (around(0.4), around(0.5))})
    for variant, v1 in ((UNTRAINED, 0.005), (QUICK, 0.713), (SPECTRAL, 0.710)):
        values |= {(OURS, variant.row, V1): around(v1), (OURS, variant.row, LEAD): AHEAD if v1 > 0.1 else BEHIND}
    values |= {(OURS, QUICK.row, GAP): (0.003, -0.002, 0.008), (OURS, QUICK.row, TARGET): around(0.97)}
    values |= {
        (COMPRESSED, READ, R_EFF): around(282), (COMPRESSED, READ_THROUGH, R_EFF): around(40),
        (COMPRESSED, READ, K20): around(0.5), (COMPRESSED, READ_THROUGH, K20): around(0.8),
    }  # fmt: skip
    values |= lines(KEPT, (DELTA, V1, HELD, RHO), {DEPTH: [around(own) for own in (0.99, 0.8, 0.9, 0.9)]})
    return finished(values | (changes or {}))


CASES = {
    "RandNLA at q = 1": {(OURS, QUICK.row, GAP): BEHIND},
    "A randomly": {(OURS, UNTRAINED.row, V1): around(0.4)},
    "The gap from random": {(OURS, QUICK.row, LEAD): (0.0, -0.01, 0.01), (OURS, SPECTRAL.row, LEAD): BEHIND},
    "Trained networks": {(OURS, QUICK.row, V1): around(0.3), (OURS, SPECTRAL.row, V1): around(0.3)},
    "A single power-iteration": {(OURS, QUICK.row, TARGET): around(0.7)},
    "Compression moves": {(COMPRESSED, READ_THROUGH, R_EFF): around(282)},
    "The bottleneck keeps": {(KEPT, DEPTH, DELTA): around(0.9)},
    "The compressed and": {(KEPT, DEPTH, column): around(0.3) for column in (V1, HELD, RHO)},
}


def test_there_is_a_case_for_every_claim() -> None:
    for claim in SPN_VAE.claims:
        assert sum(claim.sentence.startswith(beginning) for beginning in CASES) == 1


@pytest.mark.parametrize("claim", CASES)
def test_a_claim_holds_on_the_rows_that_the_paper_describes(claim) -> None:
    word, why = judged(SPN_VAE, rows_with(), claim)
    assert word == "holds" and "tiny-scenes" in why


@pytest.mark.parametrize("claim", CASES)
def test_a_claim_does_not_hold_where_all_that_it_says_is_otherwise(claim) -> None:
    assert judged(SPN_VAE, rows_with(CASES[claim]), claim)[0] == "does not hold"


@pytest.mark.parametrize("claim", [claim for claim, changes in CASES.items() if len(changes) > 1])
def test_a_claim_holds_partly_where_some_of_it_is_otherwise(claim) -> None:
    for place, known in CASES[claim].items():
        assert judged(SPN_VAE, rows_with({place: known}), claim)[0] == "holds partly", place


@pytest.mark.parametrize("claim", CASES)
def test_without_rows_nothing_is_said(claim) -> None:
    assert judged(SPN_VAE, finished({}), claim)[0] == "not at this scale"


def test_little_is_judged_by_its_parts() -> None:
    behind = rows_with({(OURS, QUICK.row, GAP): (-0.008, -0.009, -0.007)})
    assert judged(SPN_VAE, behind, "RandNLA at q = 1")[0] == "holds partly"
    nearly = rows_with({(OURS, QUICK.row, TARGET): around(0.89)})
    assert judged(SPN_VAE, nearly, "A single power-iteration")[0] == "holds partly"
    tractable = {(COMPRESSED, READ, R_EFF): around(5.0), (COMPRESSED, READ_THROUGH, R_EFF): around(3.0)}
    word, why = judged(SPN_VAE, rows_with(tractable), "Compression moves")
    assert word == "holds partly" and "1.67 times less" in why  # 53 or less says nothing of one that was so before


def test_the_footnote_names_the_constant_subspace() -> None:
    (note,) = SPN_VAE.footnotes
    assert "0.400 (0.395 to 0.405)" in str(note(rows_with()))
    assert note(finished({})) is None


# A run


def test_a_run_measures_every_place_and_networks_twice_the_same(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("pullback.experiments.run.commit", lambda: "the same")  # others may commit in between
    rows = {(row["table"], row["row"], row["column"]): row for row in run(MINE, tmp_path / "one")}
    assert all(row["value"] is not None for row in rows.values())
    assert {row for table, row, _ in rows if table == OURS} == {own.row for own in RUN}
    assert {row for table, row, _ in rows if table == COMPRESSED} == {READ, READ_THROUGH, LATENT}
    assert {column for table, _, column in rows if table == COMPRESSED} == {*SPECTRUM}

    def value(row, column, table=OURS) -> float:
        return rows[table, row, column]["value"]

    assert value(QUICK.row, GAP) == pytest.approx(value(QUICK.row, V1) - value(SPECTRAL.row, V1), abs=1e-9)
    assert value(QUICK.row, LEAD) == pytest.approx(value(QUICK.row, V1) - value(CONSTANT.row, V1), abs=1e-9)
    assert value(QUICK_FROM_CONSTANT.row, V1) > value(QUICK.row, V1)  # three steps from the start of each
    assert 0.5 < value(DEPTH, DELTA, KEPT) <= 1 and 0 < value(DEPTH, HELD, KEPT) <= 1
    networks = cut_down(MINE, lambda cell: cell.key.startswith(OURS))
    run(networks, tmp_path / "two")
    both = [rows_file(MINE, tmp_path / folder).read_text().splitlines() for folder in ("one", "two")]
    assert [line for line in both[0] if f'"{OURS}"' in line] == both[1]
