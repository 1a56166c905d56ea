"""The ablations of the head: what is listed, what a row says, and how the paper's sentences are judged."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pullback.experiments import ablations as module
from pullback.experiments import run as runner
from pullback.experiments.ablations import (
    AGREE,
    CHANGE,
    CLS,
    DPT,
    DPT_S,
    HEAD_ABLATIONS,
    HEADS,
    IMP,
    NORMS,
    OF_CLS,
    OF_DENSE,
    PAPER,
    PARAMETERS,
    RANKING,
    RHO,
    RHO_OWN,
    SCENES_CLS,
    SCENES_DEPTH,
    SIZE,
    SPREAD,
    TARGET,
    WEIGHTS,
    WIDTHS,
    row_of,
    training_sets,
)
from pullback.experiments.experiment import Found, Place
from pullback.experiments.run import run_experiments
from pullback.experiments.scales import SCALES, scale_of
from pullback.experiments.soft_merge import RATIOS
from pullback.runs.progress import Progress

CLAIMS = {claim.sentence: claim.judge for claim in HEAD_ABLATIONS.claims}
SMALL = {
    "seeds": 3, "steps": 3, "batch": 4, "size of scenes": 56, "scenes: tested": 2, "scenes: trained on": 8,
    "scenes: most": 12, "scenes: tested, dense": 2, "scenes: trained on, dense": 4, "scenes: most, dense": 6,
    "photos: tested": 2, "photos: trained on": 4, "photos: most": 8, "photos: tested, dense": 2,
    "photos: trained on, dense": 4, "photos: most, dense": 8,
}  # fmt: skip


def judge(words: str):
    (found,) = [judge for sentence, judge in CLAIMS.items() if words in sentence]
    return found


def rows(*known: tuple) -> Found:
    """(table, row, column, value[, low, high]) as finished rows."""
    names = ("table", "row", "column", "value", "low", "high")
    return Found(dict(zip(names, (*one, None, None)[:6], strict=True)) for one in known)


def changed(table: str, block, variant, *change: float) -> tuple:
    return (table, row_of(block, getattr(variant, "name", variant)), CHANGE, *change)


# ---- what is listed


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_cells_are_valid_and_hold_every_number_of_the_paper(scale) -> None:
    cells = HEAD_ABLATIONS.checked_cells(scale)
    assert all(cell.forwards > 0 for cell in cells)
    for block in (CLS, SCENES_CLS, SCENES_DEPTH):
        assert any(place.row.startswith(block.title) for cell in cells for place in cell.places)
    assert len(PAPER) == 7 * (3 + 6 + 4 + 4) + 4


def test_the_paper_is_quoted_as_it_is_printed() -> None:
    def of(table: str, block, variant: str) -> list:
        return [PAPER[Place(table, row_of(block, variant), ratio)] for ratio in RATIOS]

    assert of(RANKING, CLS, "w_rank = 1.0") == [0.001, 0.007, 0.024, 0.058, 0.249, 0.793, 2.171]
    assert of(SIZE, CLS, "2 heads") == [0.001, 0.006, 0.020, 0.052, 0.226, 0.741, 2.011]
    assert of(OF_CLS, CLS, "n = 4000") == [0.001, 0.007, 0.025, 0.064, 0.273, 0.872, 2.196]
    assert of(OF_DENSE, DPT, "n = 500") == [0.997, 1.452, 1.787, 2.130, 2.797, 3.421, 3.927]


def test_training_sets_reach_4000_pictures_where_there_are_so_many() -> None:
    tiny, paper = SCALES["tiny"], SCALES["paper"]
    assert training_sets(CLS, paper) == training_sets(DPT, paper) == [500, 1000, 2000, 4000]
    assert training_sets(SCENES_CLS, SCALES["small"]) == [250, 500, 1000, 4000]
    assert training_sets(SCENES_CLS, tiny) == [16, 32, 64, 128] and training_sets(SCENES_DEPTH, tiny) == [2, 4, 8, 16]
    assert {counts["seeds"] for counts in module.COUNTS.values()} == {3}


def test_larger_sets_than_the_photographs_of_a_scale_are_absent(tmp_path: Path) -> None:
    roles = {"photos": str(tmp_path), "photos-train": str(tmp_path)}
    scale = scale_of("small", models={"dinov2": "facebook/dinov2-small"}, data=roles)
    assert training_sets(CLS, scale) == [500, 1000, 1700, 2000, 4000]
    cells = {cell.key: scale.why_absent(cell) for cell in HEAD_ABLATIONS.checked_cells(scale)}
    assert cells[f"{OF_CLS}: {CLS.title} · n = 1700"] is None
    assert cells[f"{OF_CLS}: {CLS.title} · n = 2000"] == (
        "not at this scale: of its photographs at most 1700 are trained on"
    )
    assert cells[f"{TARGET}: {DPT_S.title} · block norms"] is None
    paper = {cell.key: SCALES["paper"].why_absent(cell) for cell in HEAD_ABLATIONS.checked_cells(SCALES["paper"])}
    assert "one of DINOv2-S" in str(paper[f"{TARGET}: {DPT_S.title} · block norms"])


# ---- verdicts


@pytest.mark.parametrize(
    ("words", "table", "block", "variants"),
    [
        ("nearly the same for the ranking weights", RANKING, CLS, (WEIGHTS["0.0"], WEIGHTS["1.0"])),
        ("plateaus at width 256", SIZE, CLS, (WIDTHS[512], HEADS[8])),
    ],
)
def test_larger_changes_than_the_noise_decide(words, table, block, variants) -> None:
    first, second = variants
    better, same, vague = (-0.2, -0.3, -0.1), (0.02, -0.05, 0.1), (-0.2, -0.6, 0.4)

    def word(*changes: tuple[float, float, float]) -> str:
        known = (changed(table, block, variant, *change) for variant, change in zip(variants, changes, strict=True))
        return judge(words)(rows(*known)).word

    assert word(same, (-0.03, -0.04, -0.02)) == "holds"
    assert word(better, same) == "holds partly"
    assert word(better, better) == "does not hold"
    assert word(vague, vague) == judge(words)(rows()).word == "not at this scale"
    assert word(vague, same) == "holds"
    said = judge(words)(rows(changed(table, block, first, *vague))).why
    assert "-20.0% (-60.0% to +40.0%, which decides nothing)" in said and second.name not in said


def test_the_papers_model_alone_decides_where_it_was_measured() -> None:
    ours = changed(RANKING, SCENES_CLS, WEIGHTS["0.0"], 0.5, 0.4, 0.6)
    theirs = changed(RANKING, CLS, WEIGHTS["0.0"], 0.0, -0.1, 0.1)
    assert judge("ranking weights")(rows(ours)).word == "does not hold"
    assert judge("ranking weights")(rows(ours, theirs)).word == "holds"


def test_block_norms_are_judged_by_rho_errors_and_spread() -> None:
    def own(block, imp: float, norms: float) -> list[tuple]:
        values = ((IMP, imp), (NORMS, norms))
        return [(TARGET, row_of(block, v.name), RHO_OWN, rho, rho - 0.02, rho + 0.02) for v, rho in values]

    lower = judge("plain block norms only ρ")
    assert lower(rows(*own(DPT, 0.2, 0.09))).word == "holds"
    assert lower(rows(*own(DPT_S, 0.7, 0.69))).word == "does not hold"
    assert lower(rows(*own(DPT_S, 0.7, 0.5), *own(SCENES_DEPTH, 0.7, 0.7))).word == "holds partly"
    assert lower(rows()).word == "not at this scale"

    assert lower(rows(*own(DPT_S, 0.7, 0.5))).word == "holds partly", "the order alone"

    def rhos(dense: float, token: float, of=(DPT, CLS)) -> list[tuple]:
        known = zip(of, (dense, token), strict=True)
        return [(TARGET, row_of(block, IMP.name), RHO, rho, rho - 0.02, rho + 0.02) for block, rho in known]

    weak = judge("almost perfectly")
    assert weak(rows(*rhos(0.2, 0.998))).word == "holds"
    assert weak(rows(*rhos(0.98, 0.99))).word == "does not hold"
    both = [*rhos(0.5, 0.9, (DPT_S, CLS)), *rhos(0.7, 0.7, (SCENES_DEPTH, SCENES_CLS))]
    assert weak(rows(*both)).word == "holds", "the paper's class token, and scenes not beside photographs"
    assert weak(rows(*rhos(0.7, 0.7, (SCENES_DEPTH, SCENES_CLS)))).word == "does not hold"
    assert weak(rows(*rhos(0.7, 0.7)[:1])).word == "not at this scale"

    essential = judge("essential")
    assert essential(rows(changed(TARGET, DPT, NORMS, 0.3, 0.1, 0.5))).word == "holds"
    assert essential(rows(changed(TARGET, DPT, NORMS, 0.0, -0.1, 0.1))).word == "does not hold"
    more = changed(TARGET, DPT_S, NORMS, 0.3, 0.1, 0.5), changed(TARGET, SCENES_DEPTH, NORMS, -0.1, -0.2, 0.0)
    assert essential(rows(*more)).word == "holds partly"
    assert essential(rows(changed(TARGET, DPT, NORMS, 0.3, -0.4, 0.9))).word == "not at this scale"

    def spread(block, norms: float) -> list[tuple]:
        return [(TARGET, row_of(block, v.name), SPREAD, value) for v, value in ((IMP, 0.8), (NORMS, norms))]

    constant = judge("approximately constant")
    assert constant(rows(*spread(DPT, 0.02))).word == "holds"
    assert constant(rows(*spread(DPT, 0.6))).word == "does not hold"
    assert constant(rows(*spread(DPT_S, 0.6), *spread(SCENES_DEPTH, 0.05))).word == "holds partly"
    assert constant(rows()).word == "not at this scale"


def test_two_heads_must_be_better_at_each_ratio_but_the_first() -> None:
    two, four = (row_of(CLS, HEADS[count].name) for count in (2, 4))

    def word(*change: float, worse_at: tuple[str, ...] = ("0.05",)) -> str:
        ratios = [(SIZE, four, ratio, 1.0) for ratio in RATIOS]
        ratios += [(SIZE, two, ratio, 1.0 if ratio in worse_at else 0.9) for ratio in RATIOS]
        return judge("Two heads")(rows(*ratios, changed(SIZE, CLS, HEADS[2], *change))).word

    assert word(-0.1, -0.15, -0.05) == "holds"
    assert word(-0.1, -0.15, -0.05, worse_at=("0.30",)) == "holds partly"
    assert word(0.1, 0.05, 0.15, worse_at=RATIOS) == "does not hold"
    assert word(-0.1, -0.6, 0.5) == judge("Two heads")(rows()).word == "not at this scale"


def test_training_sets_are_judged_by_the_largest() -> None:
    def word(*change: float) -> str:
        return of_sets((500, 2000, 4000), *change)

    def of_sets(sizes: tuple[int, ...], *change: float) -> str:
        known = [changed(OF_CLS, CLS, f"n = {size}", 0.3, 0.2, 0.4) for size in sizes[:-1]]
        return judge("saturates")(rows(*known, changed(OF_CLS, CLS, f"n = {sizes[-1]}", *change))).word

    better = (-0.3, -0.4, -0.2)
    assert word(0.02, -0.05, 0.1) == word(-0.03, -0.04, -0.02) == "holds"
    assert word(*better) == "does not hold"
    assert word(-0.3, -0.9, 0.2) == judge("saturates")(rows()).word == "not at this scale"
    assert of_sets((500, 1000, 1700), 0.02, -0.05, 0.1) == "holds"
    assert of_sets((500, 1000, 1700), *better) == "not at this scale", "no gain beyond 2,000"
    assert of_sets((32, 64, 128), 0.02, -0.05, 0.1) == "not at this scale", "too few to speak of"

    def trend(*values: float, width: float = 0.02) -> str:
        sets = zip((500, 1000, 2000, 4000), values, strict=True)
        known = [changed(OF_DENSE, DPT, f"n = {n}", value, value - width, value + width) for n, value in sets]
        known += [(OF_DENSE, row_of(DPT, f"n = {n}"), r, 1.0 / n) for n in (500, 1000, 2000, 4000) for r in RATIOS]
        verdict = judge("no consistent trend")(rows(*known))
        assert "lowest with 4000, 4000" in verdict.why
        return verdict.word

    assert trend(0.1, -0.1, 0.0, 0.1) == trend(0.03, 0.02, 0.01, 0.0) == "holds"
    assert trend(0.3, 0.2, 0.1, 0.0) == trend(0.0, 0.1, 0.2, 0.3) == "does not hold"
    assert trend(0.3, 0.2, 0.1, 0.0, width=0.4) == "not at this scale"
    few = [changed(OF_DENSE, SCENES_DEPTH, f"n = {n}", 0.0, -0.1, 0.1) for n in (2, 4, 8, 16)]
    assert judge("no consistent trend")(rows(*few)).word == "not at this scale"
    assert judge("no consistent trend")(rows()).word == "not at this scale"


def test_rho_must_come_close_to_the_papers() -> None:
    def word(*rho: float) -> str:
        return judge("0.998")(rows((OF_CLS, row_of(CLS, "n = 2000"), RHO, *rho))).word

    assert word(0.996, 0.994, 0.998) == "holds"
    assert word(0.98, 0.97, 0.99) == "holds partly"
    assert word(0.7, 0.6, 0.8) == "does not hold"
    assert judge("0.998")(rows()).word == "not at this scale"


def test_an_interval_that_ends_at_zero_ends_there() -> None:
    assert module.range_of({"value": -0.2, "low": -0.3, "high": 0.0}) == (-0.2, -0.3, 0.0)
    assert module.range_of({"value": 0.5, "low": None, "high": None}) == (0.5, 0.5, 0.5)


def test_the_footnote_says_how_alike_the_targets_are() -> None:
    (note,) = HEAD_ABLATIONS.footnotes
    assert note(rows()) is None
    assert "0.988 (DINOv2-S depth head, L4)" in str(note(rows((TARGET, row_of(DPT_S, NORMS.name), AGREE, 0.988))))


# ---- a run


WANTED = [
    f"{TARGET}: {row_of(SCENES_CLS, NORMS.name)}", f"{SIZE}: {row_of(SCENES_CLS, HEADS[2].name)}",
    f"{SIZE}: {row_of(SCENES_CLS, HEADS[4].name)}", f"{OF_CLS}: {row_of(SCENES_CLS, 'n = 2')}",
    f"{OF_CLS}: {row_of(CLS, 'n = 500')}",
]  # fmt: skip


def test_a_run_measures_three_seeds_and_comes_to_the_same_bytes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(module.COUNTS, "tiny", SMALL)
    monkeypatch.setattr(runner, "commit", lambda: "of today")
    short = replace(
        HEAD_ABLATIONS, paper={}, figures=(),
        cells=lambda scale: [cell for cell in module.ablation_cells(scale) if cell.key in WANTED],
    )  # fmt: skip
    for folder in ("one", "two"):
        run_experiments([short], SCALES["tiny"], tmp_path / folder, torch.device("cpu"), Progress())
    files = [tmp_path / folder / "head-ablations" / "rows.jsonl" for folder in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()
    known = {Place(row["table"], row["row"], row["column"]): row for row in map(json.loads, files[0].open())}
    assert len({place.row for place in known}) == len(WANTED)
    norms = [known[TARGET, row_of(SCENES_CLS, NORMS.name), column] for column in ("0.50", RHO, RHO_OWN, AGREE)]
    assert "over 3 seeds" in norms[0]["note"] and norms[0]["count"] == 2 and norms[0]["over"] == "images and seeds"
    assert norms[1]["value"] != norms[2]["value"] and norms[3]["value"] > 0.9
    four = known[SIZE, row_of(SCENES_CLS, HEADS[4].name), CHANGE]
    assert (four["value"], four["low"], four["high"]) == (0, 0, 0)
    assert known[SIZE, row_of(SCENES_CLS, HEADS[2].name), CHANGE]["value"] != 0
    assert known[SIZE, row_of(SCENES_CLS, HEADS[2].name), PARAMETERS]["value"] == pytest.approx(165_000, rel=0.02)
    assert known[OF_CLS, row_of(SCENES_CLS, "n = 2"), "0.50"]["note"].startswith("2 images, 3 steps of 2")
    absent = known[OF_CLS, row_of(CLS, "n = 500"), "0.50"]
    assert absent["value"] is None and "it has no dinov2" in absent["absent"]
