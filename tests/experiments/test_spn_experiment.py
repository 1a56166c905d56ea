"""Networks by supervision as an experiment: dense Jacobians beside what is measured, teachers, verdicts on rows made by
hand, and one small run."""

from dataclasses import replace

import pytest
import torch

from helpers.finished import Known, cut_down, finished, judged, rows_file, run
from pullback.experiments.experiment import Found
from pullback.experiments.scales import SCALES
from pullback.experiments.spn import (
    ENERGIES,
    FROM_EXACT,
    FROM_NETWORK,
    HEADS,
    MAP,
    MODES_ALONE,
    NO_ROUND,
    OWN,
    SIZE,
    SPN,
    TINY,
    TWO_ROUNDS,
    VARIANTS,
    WIDER,
    columns_of,
    ground,
    heads_table,
)
from pullback.experiments.spn import LESS as LESS_EXACT
from pullback.experiments.spn_training import (
    BASE,
    CONSTANT,
    DIRECTIONS,
    DISTANCES,
    GAP,
    LEAD,
    PATCH_LEAD,
    QUICK,
    QUICK_FROM_CONSTANT,
    RANK,
    RHO,
    SHARE,
    SPECTRAL,
    TARGET,
    UNTRAINED,
    V1,
    HeldRandNLA,
    network_of,
    scores,
)
from pullback.experiments.workshop import Workshop
from pullback.learning.train_spn import DistanceMatching, KnownModes, RandNLA, RandomDirections
from pullback.operators import JacobianOperator
from pullback.randnla import Streams
from pullback.runs.progress import Progress

FEW = {
    "images": 3, "train": 8, "steps": 4, "width": 16, "scene size": 56, "spn images": 6, "spn steps": 3,
    "spn batch": 2, "spn width": 16, "spn seeds": 1, "constant pictures": 5,
}  # fmt: skip
RUN = (CONSTANT, UNTRAINED, DISTANCES, QUICK, SPECTRAL, QUICK_FROM_CONSTANT)
MINE = cut_down(SPN, lambda cell: cell.key in {*(f"{TINY.table}: {own.row}" for own in RUN), heads_table(TINY)}, **FEW)
OURS, HEAD = TINY.table, heads_table(TINY)


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return Workshop(MINE, SCALES["tiny"], tmp_path_factory.mktemp("spn"), torch.device("cpu"), Progress())


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_lists_every_variant_of_both_settings(scale) -> None:
    cells = SPN.checked_cells(SCALES[scale])
    rows = {place.row for cell in cells for place in cell.places}
    assert rows == {*(own.row for own in VARIANTS), *HEADS}
    assert len(cells) == 2 * (len(VARIANTS) + 1) and all(cell.forwards >= 0 for cell in cells)
    assert {len(own) for own in ({variant.row for variant in VARIANTS}, {*VARIANTS})} == {len(VARIANTS)}


# What is measured, against dense Jacobians


def _dense(shop: Workshop) -> list[torch.Tensor]:
    """J [M, N D] of the held-out pictures, float64."""
    own = ground(shop, TINY)
    features = own.held_out.features(torch.arange(3))
    return list(JacobianOperator(own.probe, features).dense().double())


def _scores(shop: Workshop, variant) -> dict[str, torch.Tensor]:
    own = ground(shop, TINY)
    return scores(shop, lambda: own, own.name, variant)


def test_the_constant_subspace_is_the_best_one_of_the_training_pictures_and_its_numbers_are_those_of_dense_j(shop):
    own, found = ground(shop, TINY), _scores(shop, CONSTANT)
    stacked = own.modes[: FEW["constant pictures"]].double().flatten(2).flatten(0, 1)
    best = torch.linalg.svd(stacked, full_matrices=False)[2][:RANK].T  # [N D, r]
    for number, jacobian in enumerate(_dense(shop)):
        _, values, modes = torch.linalg.svd(jacobian, full_matrices=False)
        truth = (modes[:RANK] @ best).square().sum() / RANK
        share = (jacobian @ best).square().sum() / values[:RANK].square().sum()
        assert float(found["v1"][number]) == pytest.approx(float(truth), abs=2e-3)
        assert float(found["share"][number]) == pytest.approx(float(share), abs=2e-3)


def test_the_numbers_of_a_network_are_those_of_its_dense_metric(shop) -> None:
    own, found = ground(shop, TINY), _scores(shop, QUICK)
    with torch.no_grad():
        metric = network_of(shop, own, QUICK, 0)(own.held_out.features(torch.arange(3)))
    for number, jacobian in enumerate(_dense(shop)):
        _, values, modes = torch.linalg.svd(jacobian, full_matrices=False)
        basis = metric.modes[number].flatten(1).double()
        assert float(found["v1"][number]) == pytest.approx(
            float((modes[:RANK] @ basis.T).square().sum() / RANK), abs=1e-4
        )
        kappa = (jacobian @ basis.T).square().sum() / values[:RANK].square().sum()
        assert float(found["share"][number]) == pytest.approx(float(kappa), rel=1e-3)
        wrong = (metric.energies[number].double().log() - values[:RANK].square().log()).abs().mean()
        assert float(found["energy"][number]) == pytest.approx(float(wrong), rel=1e-3)
        tokens = modes[:RANK].unflatten(1, metric.modes.shape[2:])
        wanted = (values[:RANK, None, None].square() * tokens.square()).sum((0, 2)).sqrt()
        given = (metric.energies[number][:, None, None] * metric.modes[number].square()).sum((0, 2)).sqrt()
        ranks = [own.double().argsort().argsort().double() for own in (wanted, given)]
        rho = torch.corrcoef(torch.stack(ranks))[0, 1]
        assert float(found["rho"][number]) == pytest.approx(float(rho), abs=1e-3)


def test_targets_align_more_with_every_round_and_none_without(shop) -> None:
    means = [float(_scores(shop, own)["target"].mean()) for own in (NO_ROUND, QUICK, TWO_ROUNDS)]
    assert means[0] < 0.02 < means[1] < means[2] < 1


def test_a_network_from_the_constant_begins_there_and_all_begin_with_the_same_weights(shop) -> None:
    still = replace(MINE, counts={"tiny": {**MINE.counts["tiny"], "spn steps": 1}})
    bench = Workshop(still, SCALES["tiny"], shop.folder.parent / "still", torch.device("cpu"), Progress())
    own = ground(bench, TINY)
    held = scores(bench, lambda: own, own.name, CONSTANT)["v1"]
    begun = scores(bench, lambda: own, own.name, QUICK_FROM_CONSTANT)["v1"]
    torch.testing.assert_close(begun, held, atol=0.05, rtol=0)
    assert float(held.mean()) > 0.2


# Teachers


def test_variants_are_taught_as_they_say(shop) -> None:
    own = ground(shop, TINY)
    for variant, expected in (
        (NO_ROUND, (0, None, 0.1)), (QUICK, (1, None, 0.1)), (TWO_ROUNDS, (2, None, 0.1)), (WIDER, (1, 40, 0.1)),
        (MODES_ALONE, (1, None, 0.0)), (ENERGIES, (1, None, 1.0)),
    ):  # fmt: skip
        teacher = own.teacher(variant)
        assert isinstance(teacher, RandNLA)
        assert (teacher.power_iters, teacher.sketch_width, teacher.energy_weight) == expected
    assert isinstance(own.teacher(SPECTRAL), KnownModes)
    assert isinstance(own.teacher(DISTANCES), DistanceMatching)
    assert isinstance(own.teacher(DIRECTIONS), RandomDirections)


def test_held_jacobians_teach_what_products_teach(shop) -> None:
    own = ground(shop, TINY)
    points, rows = own.inputs[:2], torch.tensor([1, 0])
    jacobians = JacobianOperator(own.probe, points).dense()
    with torch.no_grad():
        metric = network_of(shop, own, UNTRAINED, 0)(points[rows])
    held, _ = HeldRandNLA(jacobians, 1, None, 0.1)(metric, points[rows], Streams.from_seed(3, 2, "cpu"), rows)
    made, _ = RandNLA(own.probe, 1, signal_probes=0)(metric, points[rows], Streams.from_seed(3, 2, "cpu"))
    torch.testing.assert_close(held, made, rtol=1e-3, atol=1e-4)


# Verdicts

LITTLE, MUCH, FAR = (-0.001, -0.004, 0.002), (0.1, 0.08, 0.12), (-0.5, -0.52, -0.48)


def rows_with(**changes: Known) -> Found:
    """Rows of the embedded model on which every claim holds, apart from what is changed: "ROW|COLUMN"."""
    values: dict[tuple[str, str, str], Known] = {}
    for variant in VARIANTS:
        for column in columns_of(variant):
            values[OURS, variant.row, column] = (0.8, 0.78, 0.82)
    for variant in (UNTRAINED, DISTANCES, DIRECTIONS, NO_ROUND):
        values |= {(OURS, variant.row, V1): (0.005, 0.004, 0.006), (OURS, variant.row, LEAD): FAR}
    for variant, target in ((NO_ROUND, 0.005), (QUICK, 0.4), (TWO_ROUNDS, 0.6), (WIDER, 0.5)):
        values[OURS, variant.row, TARGET] = (target, target - 0.01, target + 0.01)
    values |= {(OURS, QUICK.row, column): MUCH for column in (LEAD, PATCH_LEAD)}
    values |= {(OURS, QUICK.row, GAP): LITTLE, (OURS, TWO_ROUNDS.row, BASE): LITTLE}
    for row, rho in ((MAP, 0.5), (OWN, 0.97), (FROM_EXACT, 0.998), (FROM_NETWORK, 0.99)):
        values |= {(HEAD, row, column): (rho, rho - 0.005, rho + 0.001) for column in (RHO, "ρ patches")}
        values[HEAD, row, SIZE] = 310_000
    values |= {(HEAD, MAP, LESS_EXACT): FAR, (HEAD, FROM_NETWORK, LESS_EXACT): LITTLE}
    for name, known in changes.items():
        row, column = name.split("|")
        values[HEAD if row in HEADS else OURS, row, column] = known
    return finished(values)


CLAIMS = {
    "Naive": [f"{DISTANCES.row}|{LEAD}", f"{DIRECTIONS.row}|{LEAD}"],
    "Each step": [
        f"{QUICK.row}|{LEAD}",
        f"{TWO_ROUNDS.row}|{TARGET}",
        f"{QUICK.row}|{PATCH_LEAD}",
        f"{QUICK.row}|{V1}",
    ],
    "The SPN reaches": [f"{QUICK.row}|{GAP}"],
    "The SPN saturates": [f"{TWO_ROUNDS.row}|{BASE}"],
    "κ_cap(r) is": [f"{own.row}|{SHARE}" for own in VARIANTS],
    "Oversampling": [f"{WIDER.row}|{TARGET}"],
    "In practice": [f"{SPECTRAL.row}|{V1}", f"{SPECTRAL.row}|{SHARE}"],
    "The network's importance": [f"{OWN}|{RHO}"],
    "The head on imp*": [f"{FROM_EXACT}|{RHO}"],
    "The head is trained": [f"{MAP}|{LESS_EXACT}", f"{FROM_NETWORK}|{LESS_EXACT}"],
}
AGAINST = {
    **{f"{own.row}|{SHARE}": (1.1, 1.05, 1.2) for own in VARIANTS},
    f"{DISTANCES.row}|{LEAD}": MUCH,
    f"{DIRECTIONS.row}|{LEAD}": LITTLE,
    f"{QUICK.row}|{LEAD}": LITTLE,
    f"{QUICK.row}|{PATCH_LEAD}": FAR,
    f"{QUICK.row}|{V1}": (0.005, 0.004, 0.006),
    f"{TWO_ROUNDS.row}|{TARGET}": (0.405, 0.395, 0.415),
    f"{QUICK.row}|{GAP}": (-0.05, -0.06, -0.04),
    f"{TWO_ROUNDS.row}|{BASE}": (0.05, 0.04, 0.06),
    f"{WIDER.row}|{TARGET}": (0.405, 0.395, 0.415),
    f"{SPECTRAL.row}|{V1}": (0.97, 0.94, 0.99),
    f"{OWN}|{RHO}": (0.5, 0.49, 0.51),
    f"{FROM_EXACT}|{RHO}": (0.975, 0.97, 0.98),
    f"{MAP}|{LESS_EXACT}": LITTLE,
    f"{FROM_NETWORK}|{LESS_EXACT}": FAR,
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_holds_on_the_rows_that_the_paper_describes(claim) -> None:
    word, why = judged(SPN, rows_with(), claim)
    assert word == "holds" and why.startswith(OURS) and "not measured" not in why


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_does_not_hold_where_all_that_it_says_is_otherwise(claim) -> None:
    assert judged(SPN, rows_with(**{name: AGAINST[name] for name in CLAIMS[claim]}), claim)[0] == "does not hold"


@pytest.mark.parametrize("claim", [claim for claim, names in CLAIMS.items() if len(names) > 1])
def test_a_claim_holds_partly_where_some_of_it_is_otherwise(claim) -> None:
    for name in CLAIMS[claim]:
        assert judged(SPN, rows_with(**{name: AGAINST[name]}), claim)[0] == "holds partly", name


def test_measurably_behind_by_next_to_nothing_holds_partly() -> None:
    behind, better = (-0.008, -0.010, -0.006), (0.008, 0.006, 0.010)
    assert judged(SPN, rows_with(**{f"{QUICK.row}|{GAP}": behind}), "The SPN reaches")[0] == "holds partly"
    assert judged(SPN, rows_with(**{f"{TWO_ROUNDS.row}|{BASE}": better}), "The SPN saturates")[0] == "holds partly"
    assert (
        judged(SPN, rows_with(**{f"{OWN}|{RHO}": (0.9, 0.89, 0.91)}), "The network's importance")[0] == "holds partly"
    )


def test_networks_that_learned_nothing_reach_no_ceiling() -> None:
    nothing = (0.006, 0.005, 0.007)
    untaught = rows_with(**{f"{own.row}|{V1}": nothing for own in (QUICK, SPECTRAL)})
    for claim in ("The SPN reaches", "The SPN saturates"):
        assert judged(SPN, untaught, claim)[0] == "does not hold"


@pytest.mark.parametrize("claim", [claim.sentence for claim in SPN.claims])
def test_without_rows_nothing_is_said(claim) -> None:
    assert judged(SPN, finished({}), claim)[0] == "not at this scale"
    lone = finished({(OURS, CONSTANT.row, V1): (0.5, 0.4, 0.6)})  # a run that was stopped after its first cell
    assert judged(SPN, lone, claim)[0] == "not at this scale"


def test_footnotes_name_what_was_measured_and_fall_silent_without_rows() -> None:
    notes = [note(rows_with()) for note in SPN.footnotes]
    assert all(note is not None and OURS in note for note in notes)
    assert "1.0e-4" in str(notes[1]) and "0.005 (0.004 to 0.006)" in str(notes[1])
    assert [note(finished({})) for note in SPN.footnotes] == [None] * len(notes)


# A run


def test_a_run_measures_every_place_and_a_second_one_the_same_bytes(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("pullback.experiments.run.commit", lambda: "the same")  # others may commit in between
    rows = {(row["table"], row["row"], row["column"]): row for row in run(MINE, tmp_path / "one")}
    assert {row for table, row, _ in rows if table == HEAD} == {*HEADS}
    assert all(row["value"] is not None for row in rows.values())

    def value(row, column, table=OURS) -> float:
        return rows[table, row, column]["value"]

    assert value(QUICK.row, LEAD) == pytest.approx(value(QUICK.row, V1) - value(CONSTANT.row, V1))
    assert value(QUICK.row, GAP) == pytest.approx(value(QUICK.row, V1) - value(SPECTRAL.row, V1))
    assert value(SPECTRAL.row, BASE) == pytest.approx(-value(QUICK.row, GAP))
    assert value(FROM_NETWORK, LESS_EXACT, HEAD) == pytest.approx(
        value(FROM_NETWORK, RHO, HEAD) - value(FROM_EXACT, RHO, HEAD)
    )
    assert value(OWN, RHO, HEAD) == pytest.approx(value(QUICK.row, RHO))
    assert value(FROM_NETWORK, RHO, HEAD) != value(FROM_EXACT, RHO, HEAD)
    run(MINE, tmp_path / "two")
    assert rows_file(MINE, tmp_path / "one").read_bytes() == rows_file(MINE, tmp_path / "two").read_bytes()
