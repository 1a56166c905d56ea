"""Regimes, sweep and probes of several layers: the rows against dense matrices, the verdicts on rows made by hand, and
the paper's numbers at their places."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.finished import Known, cut_down, finished, judged, lines, rows_file, run
from pullback.experiments.diagnosis_rows import (
    COLUMNS,
    CV,
    K20,
    K50,
    K_EFF,
    NULL,
    NUMBERS,
    R90,
    R_EFF,
    RATIO,
    REGIME,
    TRUNC,
    bound_of,
    diagnosed_cells,
    dinov2_depth,
)
from pullback.experiments.experiment import Found, Place
from pullback.experiments.scales import SCALES
from pullback.experiments.subjects import (
    Diagnosis,
    Subject,
    deciding,
    dense_jacobian,
    diagnosis,
    exact_spectrum,
    told,
)
from pullback.experiments.taxonomy import FULL_SWEEP, MULTI_LAYER, PROBED, REGIMES, SWEEP, TAXONOMY
from pullback.experiments.workshop import Workshop
from pullback.probes import INPUTS
from pullback.runs.files import read_arrays
from pullback.runs.progress import Progress

FEW = {"images": 2, "dense": 1, "scenes": 1, "size": 56, "view size": 24}
SHOWN = {
    REGIMES: (K20, CV, NULL, R_EFF, R90, REGIME),
    SWEEP: (K20, TRUNC, R_EFF, RATIO, CV, NULL),
    PROBED: (K20, K50, R_EFF, R90, K_EFF, CV, NULL),
}


def named(table: str, values: dict[str, tuple[Known, ...]]) -> Found:
    return finished(lines(table, SHOWN[table], values))


def shop_of(out: Path, experiment=TAXONOMY) -> Workshop:
    cut = cut_down(experiment, lambda cell: True, **FEW)
    return Workshop(cut, SCALES["tiny"], out, torch.device("cpu"), Progress())


CLS = Subject("tiny-scenes CLS, L10", "tiny-scenes", "cls", 10, 192, "scenes")


# Rows against dense matrices


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return shop_of(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def singular_values(shop) -> np.ndarray:
    """Of both pictures [2, 192], by a plain decomposition of the dense Jacobian."""
    matrices = [dense_jacobian(shop, CLS, number, 2)[0].matrix[0].double() for number in range(2)]
    return np.stack([torch.linalg.svdvals(matrix).numpy() for matrix in matrices])


def test_a_diagnosis_is_that_of_the_dense_jacobian(shop, singular_values) -> None:
    found = diagnosis(shop, CLS)
    energy = singular_values**2
    shares = energy / energy.sum(1, keepdims=True)
    np.testing.assert_allclose(found.kappa_at(20), shares[:, :20].sum(1), rtol=1e-4)
    np.testing.assert_allclose(found.kappa_at(10_000), shares[:, :50].sum(1), rtol=1e-4)
    np.testing.assert_allclose(found.r_eff, np.exp(-(shares * np.log(shares)).sum(1)), rtol=1e-3)
    first = shares[:, :20] / shares[:, :20].sum(1, keepdims=True)
    np.testing.assert_allclose(found.r_eff_trunc, np.exp(-(first * np.log(first)).sum(1)), rtol=1e-3)
    np.testing.assert_array_equal(found.r90, 1 + (shares.cumsum(1) < 0.9).sum(1))
    assert (found.outputs, found.rank_limit) == (192, 192) and found.null == pytest.approx(0.051, abs=1e-3)


def test_exact_spectra_have_all_singular_values_and_the_energies_of_tokens(shop, singular_values) -> None:
    found = exact_spectrum(shop, CLS, 2)
    torch.testing.assert_close(found["singular_values"], torch.tensor(singular_values), rtol=1e-4, atol=1e-8)
    matrix, tokens = dense_jacobian(shop, CLS, 1, 2)
    blocks = matrix.matrix[0].double().unflatten(1, (tokens, -1))
    torch.testing.assert_close(found["block_norms"][1], blocks.square().sum((0, 2)).sqrt(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["token_energies"].sum(-1), torch.ones(2, 20, dtype=torch.float64))
    assert found["width"].tolist() == [192, 192] and tokens == 17


def test_what_was_diagnosed_lies_in_the_store_by_what_decides_it(shop, monkeypatch) -> None:
    diagnosis(shop, CLS)
    monkeypatch.setattr("pullback.experiments.subjects.diagnose", None)
    again = Workshop(shop.experiment, shop.scale, shop._out, shop.device, Progress())
    assert torch.equal(diagnosis(again, CLS).kappa, diagnosis(shop, CLS).kappa)
    with pytest.raises(TypeError):
        diagnosis(again, CLS.at("another", 9))
    with pytest.raises(TypeError):
        diagnosis(again, CLS, (20, 30))


def test_a_lower_bound_says_so() -> None:
    two = torch.zeros(2)
    own = Diagnosis(two, torch.ones(2, 50), two, two, two, two, two, torch.tensor([0.0, 1.0]), 0.1, 60, 60)
    assert bound_of(own) == "a lower bound: 1 of 2 do not reach 90 % in 50 directions"


def test_a_subject_is_counted_by_what_a_product_costs() -> None:
    counted = {Subject("", model, decoder, 3, 9).counted: (model, decoder) for model, decoder in
               (("tiny-views", "camera"), ("dinov2", "cls"), ("dinov2", "depth"))}  # fmt: skip
    assert counted == {"scenes": ("tiny-views", "camera"), "images": ("dinov2", "cls"), "dense": ("dinov2", "depth")}
    assert Subject("", "vggt", "points", 3, 9).counted == "images"
    assert CLS.parts(9) == [(0, 4), (4, 4), (8, 1)] and Subject("", "vggt", "points", 3, 9).parts(2) == [(0, 1), (1, 1)]


def test_the_depth_head_of_the_small_dinov2_is_no_head_of_the_papers() -> None:
    (small,) = diagnosed_cells("t", [dinov2_depth(8, 2)], lambda subject: (K20,), SCALES["small"])
    (paper,) = diagnosed_cells("t", [dinov2_depth(8, 2)], lambda subject: (K20,), SCALES["paper"])
    assert small.absent is None and "DINOv2-S" in (paper.absent or "")


def test_a_run_gives_the_rows_of_its_subjects_and_the_same_ones_again(tmp_path) -> None:
    mine = ("tiny-scenes CLS, L10", "tiny-views camera, L04", "VGGT points")
    cut = cut_down(TAXONOMY, lambda cell: cell.key in mine, **FEW)
    found = {(row["row"], row["column"]): row for row in run(cut, tmp_path / "one")}
    assert {place[0] for place in found} == set(mine[:2])
    assert [found[mine[0], column]["count"] for column in SHOWN[REGIMES]] == [2] * 6
    assert found[mine[1], REGIME]["value"] == 4 and "rank-bounded" in found[mine[1], REGIME]["note"]
    assert found[mine[1], K20]["value"] == pytest.approx(1, abs=1e-4) and found[mine[1], R_EFF]["value"] <= 9
    assert "over the patches alone" in found[mine[0], CV]["note"]
    spectra = read_arrays(tmp_path / "one" / "taxonomy" / "arrays" / "spectrum.npz")
    assert list(spectra) == list(mine[:2]) and (spectra[mine[0]][:, 0] == 1).all()
    run(cut, tmp_path / "two")
    assert rows_file(cut, tmp_path / "one").read_bytes() == rows_file(cut, tmp_path / "two").read_bytes()


def test_the_sweep_has_the_truncated_rank_and_its_ratio(shop) -> None:
    found = diagnosis(shop, CLS)
    (cell,) = [cell for cell in FULL_SWEEP.cells(SCALES["tiny"]) if cell.key == CLS.row]
    assert cell.run is not None
    rows = {one.column: one for one in cell.run(shop)}
    assert list(rows) == list(SHOWN[SWEEP])
    assert rows[TRUNC].value == pytest.approx(float(found.r_eff_trunc.mean())) and rows[TRUNC].value <= 20
    assert rows[R_EFF].value == pytest.approx(float(found.r_eff.mean()))
    assert rows[RATIO].value == pytest.approx(float((found.r_eff / found.r_eff_trunc).mean()))


def test_several_layers_have_a_multiplicity(tmp_path) -> None:
    cut = cut_down(MULTI_LAYER, lambda cell: cell.key == "tiny-views depth 8×8, x_vis", **FEW)
    found = {row["column"]: row for row in run(cut, tmp_path)}
    assert list(found) == list(SHOWN[PROBED])
    assert 1 <= found[K_EFF]["value"] <= 4 and found[K_EFF]["note"] == "layers 1, 3, 5, 7 of 8"
    assert found[K20]["value"] <= found[K50]["value"] <= 1


# Which rows decide


def test_the_papers_own_models_decide_where_they_have_all_columns() -> None:
    papers, ours = [Subject("theirs", "m", "cls", 2, 9)], [Subject("ours", "m", "cls", 2, 9)]
    both = finished({("t", "theirs", K20): 0.1, ("t", "ours", K20): 0.2, ("t", "ours", CV): 1.0})
    assert deciding(both, "t", papers, ours, (K20,)) == papers
    assert deciding(both, "t", papers, ours, (K20, CV)) == ours
    assert deciding(both, "t", papers, ours, (R90,)) == []
    assert told(both, "t", ["theirs", "ours"], {CV: "{:.2g}", K20: "{:.1%}"}) == (
        "theirs: κ(20) 10.0%; ours: CV 1, κ(20) 20.0%"
    )
    assert told(both, "t", [], {}, "There are none.") == "There are none."


# Verdicts: regimes

RICH, SPREAD, POINTED, BOUNDED = (NUMBERS[label] for label in ("i", "ii", "iii", "iv"))
PAPERS = {
    "DA V2 depth, L02": (0.956, 0.026, 0.0255, 34, 15, SPREAD),
    "DA V2 depth, L10 (1-layer)": (0.966, 0.026, 0.0255, 20, 15, SPREAD),
    "DINOv2 CLS, L10": (0.334, 4.06, 0.0255, 270, 200, POINTED),
    "VGGT camera, L16": (1.0, 1.2, 0.0255, 8.9, 9, BOUNDED),
    "VGGT pointcloud, L08": (0.4, 0.59, 0.0255, 212, 150, RICH),
    "VGGT depth, L16 (full)": (0.4, 0.63, 0.0255, 282, 200, RICH),
    "CLIP CLS, L10": (0.3, 3.0, 0.0255, 270, 200, POINTED),
}


@pytest.mark.parametrize("beginning", [claim.sentence for claim in TAXONOMY.claims])
def test_every_claim_about_regimes_holds_on_rows_like_the_papers(beginning: str) -> None:
    assert judged(TAXONOMY, named(REGIMES, PAPERS), beginning)[0] == "holds"


def test_four_regimes_hold_partly_where_one_is_missing() -> None:
    without = {name: values for name, values in PAPERS.items() if not name.startswith("VGGT camera")}
    word, why = judged(TAXONOMY, named(REGIMES, without), "The rows")
    assert word == "holds partly" and why.endswith("no row is in (iv).") and "(iii) DINOv2 CLS, L10, κ(20) " in why


def test_a_regime_of_ours_does_not_stand_in_where_all_of_the_papers_rows_are_there() -> None:
    camera = (1.0, 1.2, 0.0255, 60.0, 9, RICH)
    own = {**PAPERS, "VGGT camera, L16": camera, "tiny-views camera, L04": (1.0, 1.3, 0.06, 4.1, 4, BOUNDED)}
    assert judged(TAXONOMY, named(REGIMES, own), "The rows")[0] == "holds partly"


def test_regimes_are_judged_by_intervals() -> None:
    vague = {"tiny-scenes CLS, L10": ((0.4, 0.3, 0.6), (2.0, 0.5, 4.0), 0.05, 149, 138, POINTED)}
    assert judged(TAXONOMY, named(REGIMES, vague), "(iii)")[0] == "does not hold"
    vague = {"tiny-scenes depth 8×8, L02": ((0.95, 0.8, 0.99), (0.06, 0.05, 0.2), 0.05, 4, 3, SPREAD)}
    assert judged(TAXONOMY, named(REGIMES, vague), "(ii)")[0] == "does not hold"


@pytest.mark.parametrize(
    ("beginning", "values", "word"),
    [
        ("(i)", {"tiny-views points, L04": (0.95, 0.6, 0.05, 13, 13, SPREAD)}, "does not hold"),
        ("(i)", {"tiny-views points, L04": (0.95, 0.6, 0.05, 212, 90, SPREAD)}, "holds partly"),
        ("(ii)", {"tiny-scenes depth 8×8, L02": (0.99, 0.7, 0.05, 3.6, 3, SPREAD)}, "holds partly"),
        ("(ii)", {"tiny-scenes depth 8×8, L02": (0.99, 0.07, 0.05, 3.6, 3, SPREAD)}, "holds"),
        ("(ii)", {"tiny-scenes depth 8×8, L02": (0.89, 0.7, 0.05, 3.6, 3, RICH)}, "does not hold"),
        ("(ii)", {"tiny-scenes depth 8×8, L02": (0.95, 0.7, 0.05, 51, 3, RICH)}, "does not hold"),
        ("(iii)", {"tiny-scenes CLS, L10": (0.29, 0.79, 0.05, 149, 138, RICH)}, "holds partly"),
        ("(iii)", {"tiny-scenes CLS, L10": (0.51, 0.79, 0.05, 149, 138, RICH)}, "does not hold"),
        ("(iii)", {"tiny-scenes CLS, L02": (0.29, 5.0, 0.05, 149, 138, POINTED)}, "not at this scale"),
        ("CLIP's", {"tiny-scenes CLS, L10": (0.29, 5.8, 0.05, 149, 138, POINTED)}, "not at this scale"),
        ("(iv)", {"tiny-views camera, L04": (1.0, 1.3, 0.06, 4.1, 4, BOUNDED)}, "holds"),
        ("(iv)", {"tiny-views camera, L04": (1.0, 1.3, 0.06, 4.1, 4, SPREAD)}, "holds partly"),
        ("(iv)", {"tiny-views camera, L04": (0.9, 1.3, 0.06, 12, 4, SPREAD)}, "does not hold"),
        ("VGGT's depth", {"tiny-views depth 8×8, L04": (0.98, 0.8, 0.06, 7, 8, SPREAD)}, "holds partly"),
        ("VGGT's depth", {"tiny-views depth 8×8, L04": (0.98, 0.08, 0.06, 7, 8, SPREAD)}, "does not hold"),
        ("VGGT's depth", {"tiny-views depth 8×8, L04": (0.6, 0.8, 0.06, 90, 200, RICH)}, "holds"),
    ],
)
def test_a_regime_is_judged_by_our_rows_where_the_papers_are_missing(beginning: str, values: dict, word: str) -> None:
    found, why = judged(TAXONOMY, named(REGIMES, values), beginning)
    assert found == word
    assert word == "not at this scale" or next(iter(values)) in why


def test_clip_stands_in_for_dinov2_and_the_embedded_model_beside_it() -> None:
    both = {"CLIP CLS, L10": PAPERS["CLIP CLS, L10"], "tiny-scenes CLS, L10": (0.6, 0.5, 0.05, 9, 9, RICH)}
    word, why = judged(TAXONOMY, named(REGIMES, both), "(iii)")
    assert word == "holds partly" and "CLIP" in why and "tiny-scenes" in why


def test_footnotes_of_the_regimes_give_our_measurements() -> None:
    found = named(
        REGIMES,
        {
            "tiny-scenes depth 8×8, L02": (0.99, 0.7, 0.05, 3.6, 3, SPREAD),
            "tiny-views points, L04": (0.95, 0.6, 0.06, 13, 13, SPREAD),
        },
    )
    null, places, outputs = (note(found) for note in TAXONOMY.footnotes)
    assert null and "CV 0.7, random CV 0.05." in null
    assert places and "tiny-views points, L04: κ(20) 95.0%, r_eff 13." in places
    assert outputs and outputs.endswith("of 192: tiny-views points, L04: r_eff 13, r_0.90 13.")


def test_966_per_cent_in_20_of_192_directions_leave_a_rank_of_25() -> None:
    """The largest entropy: 20 equal shares and 172 equal shares."""
    shares = np.repeat([0.966 / 20, 0.034 / 172], [20, 172])
    assert 24 < np.exp(-(shares * np.log(shares)).sum()) <= 25


# Verdicts: the sweep


def sweep(kappas: dict[str, Known], **others: float) -> Found:
    known = {TRUNC: 9.0, R_EFF: 90.0, RATIO: 3.0, CV: 3.0, NULL: 0.05, **others}
    return named(
        SWEEP, {row: (kappa, *(known[column] for column in SHOWN[SWEEP][1:])) for row, kappa in kappas.items()}
    )


def test_energy_falls_with_depth_where_the_intervals_of_the_ends_do_not_touch() -> None:
    first, middle, last = ("DINOv2 CLS, L02", "DINOv2 CLS, L05", "DINOv2 CLS, L10")
    falls = sweep({first: (0.58, 0.55, 0.6), middle: (0.6, 0.5, 0.7), last: (0.33, 0.3, 0.35)})
    assert judged(FULL_SWEEP, falls, "κ(20)")[0] == "holds"
    touching = sweep({first: (0.58, 0.34, 0.7), last: (0.33, 0.3, 0.35)})
    assert judged(FULL_SWEEP, touching, "κ(20)")[0] == "does not hold"
    assert judged(FULL_SWEEP, sweep({first: 0.6}), "κ(20)")[0] == "not at this scale"
    two = {"CLIP CLS, L02": 0.6, "CLIP CLS, L10": 0.3, "tiny-scenes CLS, L02": 0.3, "tiny-scenes CLS, L10": 0.6}
    assert judged(FULL_SWEEP, sweep(two), "κ(20)")[0] == "holds partly"


def test_class_tokens_are_marginal_at_every_layer_or_at_some() -> None:
    layers = {f"DINOv2 CLS, L{layer:02d}": 0.5 for layer in (2, 5, 8, 10)}
    assert judged(FULL_SWEEP, sweep(layers), "DINOv2's")[0] == "holds"
    assert judged(FULL_SWEEP, sweep(layers, CV=0.5), "DINOv2's")[0] == "does not hold"
    mixed = sweep({"DINOv2 CLS, L02": 0.95, "DINOv2 CLS, L10": 0.5}, r_eff=40)
    assert judged(FULL_SWEEP, mixed, "DINOv2's")[0] == "holds partly"


@pytest.mark.parametrize(
    ("kappa", "rank", "ratio", "word"),
    [(0.97, 4, 1.2, "holds"), (0.97, 4, 1.5, "holds partly"), (0.9, 7, 1.5, "does not hold")],
)
def test_dense_decoders_have_a_low_rank(kappa: float, rank: float, ratio: float, word: str) -> None:
    found = sweep({"saliency, L02": kappa}, r_eff=rank, ratio=ratio)
    assert judged(FULL_SWEEP, found, "Depth Anything")[0] == word


def test_the_footnote_of_the_sweep_names_the_largest_truncated_rank() -> None:
    found = named(
        SWEEP,
        {
            "tiny-scenes CLS, L02": (0.6, 9.4, 47, 5, 1.8, 0.05),
            "tiny-scenes CLS, L10": (0.3, 18.15, 149, 8, 5.8, 0.05),
            "saliency, L02": (0.3, 19.5, 149, 8, 5.8, 0.05),
        },
    )
    said = FULL_SWEEP.footnotes[0](found)
    assert said and "L02: r_eff trunc 9.4" in said and said.endswith("the largest of all rows is 19.5 (saliency, L02).")
    assert "saliency, L02: CV 5.8" in (FULL_SWEEP.footnotes[1](found) or "")


# Verdicts: several layers

READ, SINGLE = "tiny-scenes depth 16×16, x_dpt", "tiny-scenes depth 16×16, L02"
POINTS, DEPTH, CAMERA = "tiny-views points, x_vis", "tiny-views depth 8×8, x_vis", "tiny-views camera, L04"


def probes(**changes: tuple[Known, ...]) -> Found:
    own = {
        READ: (0.8, 0.92, 36, 45, 1.1, 2.4, 0.026),
        SINGLE: (0.96, 0.99, 25, 15, 1.0, 0.06, 0.051),
        POINTS: (0.3, 0.5, 212, 150, 4.0, 2.0, 0.02),
        DEPTH: (0.3, 0.5, 282, 200, 4.0, 2.0, 0.02),
        CAMERA: (1.0, 1.0, 4.1, 4, 1.0, 1.3, 0.06),
    }
    return named(PROBED, own | {globals()[name]: values for name, values in changes.items()})


@pytest.mark.parametrize("beginning", [claim.sentence for claim in MULTI_LAYER.claims])
def test_every_claim_about_several_layers_holds_on_rows_that_are_like_it(beginning: str) -> None:
    assert judged(MULTI_LAYER, probes(), beginning)[0] == "holds"


@pytest.mark.parametrize(
    ("beginning", "changes", "word"),
    [
        ("Depth Anything at", {"READ": (0.8, 0.85, 36, 45, 1.1, 2.4, 0.026)}, "holds partly"),
        ("Depth Anything at", {"READ": (0.8, 0.85, 60, 45, 1.1, 2.4, 0.026)}, "does not hold"),
        ("Reading four", {"READ": (0.8, 0.92, 51, 45, 1.1, 2.4, 0.026)}, "does not hold"),
        ("Reading four", {"READ": (0.8, 0.92, 12, 45, 1.1, 2.4, 0.026)}, "does not hold"),
        ("VGGT's", {"DEPTH": (0.8, 0.97, 30, 29, 1.9, 2.0, 0.02)}, "holds partly"),
        ("Layers close", {"DEPTH": (0.3, 0.5, 282, 200, 1.9, 2.0, 0.02)}, "holds partly"),
        ("It is orthogonal", {"DEPTH": (0.3, 0.5, 282, 200, 1.1, 2.0, 0.02)}, "holds partly"),
        ("It is orthogonal", {"DEPTH": (0.3, 0.5, (60, 30, 90), 200, 1.1, 2.0, 0.02)}, "does not hold"),
        ("The CV", {"SINGLE": (0.96, 0.99, 25, 15, 1.0, 0.7, 0.051)}, "holds partly"),
        (
            "The CV",
            {"SINGLE": (0.9, 0.9, 25, 15, 1, 0.7, 0.05), "READ": (0.8, 0.9, 36, 45, 1, 0.7, 0.02)},
            "does not hold",
        ),
        ("90 %", {"SINGLE": (0.96, 0.99, 25, 30, 1.0, 0.06, 0.051)}, "holds partly"),
    ],
)  # fmt: skip
def test_several_layers_are_judged_by_what_they_show(beginning: str, changes: dict, word: str) -> None:
    assert judged(MULTI_LAYER, probes(**changes), beginning)[0] == word


def test_a_gap_needs_both_kinds_of_decoders() -> None:
    one = named(PROBED, {READ: (0.8, 0.92, 36, 45, 1.1, 2.4, 0.026)})
    word, why = judged(MULTI_LAYER, one, "It is orthogonal")
    assert word == "not at this scale" and "both kinds" in why
    assert judged(MULTI_LAYER, one, "Layers close")[0] == "not at this scale"


# The paper's numbers

TABLES = {
    "tab:regime_taxonomy": (
        TAXONOMY,
        REGIMES,
        (K20, CV, R_EFF, REGIME),
        """
        DA V2 depth, L02 & 95.6 & 0.026 & 34 & (ii)
        DA V2 depth, L10 (1-layer) & 96.6 & 0.026 & 20 & (ii)
        DINOv2 CLS, L10 & 33.4 & 4.06 & 270 & (iii)
        VGGT camera, L16 & ≈ 100 & N/A & 9 & (iv)
        VGGT pointcloud, L08 & 96.6 & 0.59 & 212 & (i)
        VGGT depth, L16 (full) & 76.2 & 0.63 & 282 & (i)
        """,
    ),
    "tab:full_sweep": (
        FULL_SWEEP,
        SWEEP,
        (K20, TRUNC, R_EFF, RATIO, CV),
        """
        DA, L05, 16×16 & 96.30 & 3.54 & 4.3 & 1.2 & 1.06
        DA, L05, 8×8 & 96.36 & 3.18 & 4.2 & 1.3 & 1.17
        DA, L05, 32×32 & 96.77 & 3.67 & 4.4 & 1.2 & 0.82
        DA, L08, 16×16 & 97.53 & 2.95 & 3.6 & 1.2 & 1.16
        DA, L10, 16×16 & 97.13 & 3.45 & 3.9 & 1.1 & 1.26
        DA, L10, 8×8 & 97.59 & 3.19 & 4.2 & 1.3 & 1.44
        DA, L10, 32×32 & 96.21 & 3.53 & 4.2 & 1.2 & 0.98
        DINOv2 CLS, L02 & 58.29 & 46.46 & 90.8 & 2.0 & 0.83
        DINOv2 CLS, L05 & 51.41 & 52.91 & 122.1 & 2.3 & 1.12
        DINOv2 CLS, L08 & 41.88 & 59.58 & 189.9 & 3.2 & 2.03
        DINOv2 CLS, L10 & 33.36 & 63.68 & 270.2 & 4.2 & 4.06
        """,
    ),
}


def printed(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("&")] for line in text.strip().splitlines()]


@pytest.mark.parametrize("label", TABLES)
def test_every_number_of_the_papers_tables_stands_at_its_place(label: str) -> None:
    own, table, columns, text = TABLES[label]
    for row, *values in printed(text):
        for column, value in zip(columns, values, strict=True):
            there = own.paper[Place(table, row, column)]
            if isinstance(there, str):
                assert there.removesuffix(" %") == value
            else:
                assert there == pytest.approx(float(value) / (100 if COLUMNS[column].percent else 1), abs=1e-12)
    in_table = {row for row, *_ in printed(text)}
    assert {place.row for place in own.paper} == in_table, "and no other row has a number of the paper"


@pytest.mark.weights("paper/task_induced_metrics.tex")
@pytest.mark.parametrize("label", TABLES)
def test_the_tables_are_those_of_the_paper(label: str, shared: Path) -> None:
    text = (shared / "paper" / "task_induced_metrics.tex").read_text(encoding="utf-8")
    body = text[text.index(rf"\label{{{label}}}") :]
    body = body[: body.index(r"\end{tabular}")]
    plain = re.sub(r"\\phantom\{0\}|\\%|\\emph|[${}]|\\multicolumn.*|\\[a-z]+rule", "", body)
    plain = plain.replace(r"\times", "×").replace(r"\approx", "≈")
    lined = [[cell.strip().rstrip("×").strip() for cell in line.split("&")] for line in plain.split(r"\\")]
    wanted = printed(TABLES[label][3])
    assert [line for line in lined if line[0] in {row for row, *_ in wanted}] == wanted


def test_numbers_of_the_text_about_several_layers_stand_at_their_places() -> None:
    assert {(place.row, place.column): value for place, value in MULTI_LAYER.paper.items()} == {
        ("DA V2, x_dpt", K50): 0.9,
        ("DA V2, x_dpt", R_EFF): 36.0,
        ("DA V2, x_dpt", K_EFF): 1.1,
        ("DA V2, x_dpt", CV): 2.381,
        ("DA V2 depth, L02", R_EFF): "20 to 34",
        ("DA V2 depth, L02", R90): "≈ 15",
        ("DA V2 depth, L02", CV): 0.026,
        ("VGGT pointcloud, x_vis", R_EFF): 212,
        ("VGGT pointcloud, x_vis", R90): "≫ 100",
        ("VGGT depth, x_vis", K50): 0.578,
        ("VGGT depth, x_vis", R_EFF): 282.6,
        ("VGGT depth, x_vis", R90): "≫ 100",
        ("VGGT depth, x_vis", K_EFF): 4,
        ("VGGT camera, L16", R_EFF): "≤ 9",
        ("VGGT camera, L16", R90): "≤ 9",
    }
    assert INPUTS == "inputs"
