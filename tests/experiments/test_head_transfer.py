"""Heads at places that they were not trained for: what is listed, what rho is of, and the verdicts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pullback.evaluation.ranking import spearman
from pullback.experiments import head_transfer as module
from pullback.experiments import run as runner
from pullback.experiments.experiment import Found, Place
from pullback.experiments.head_transfer import FAMILIES, HEAD_TRANSFER, MEAN_MAP, Family, transfer_cells
from pullback.experiments.run import run_experiments
from pullback.experiments.scales import SCALES, scale_of
from pullback.experiments.workshop import Workshop
from pullback.learning.shipped_heads import shipped_head
from pullback.runs.progress import Progress

DECODER, LAYER = (claim.judge for claim in HEAD_TRANSFER.claims)
COUNTS = module.TRANSFERRED["tiny"] | {
    "tested": 3, "steps": 2, "batch": 4, "size of scenes": 56, "scenes: trained on": 8, "scenes: trained on, dense": 4,
}  # fmt: skip
CUT = Family("tiny-scenes", "tiny-scenes", (("cls", 6), ("cls", 10)), "scenes-train", "scenes")


def rows(rho: dict[tuple[str, str], float], family: str = "tiny-scenes") -> Found:
    """(head, place) -> rho as finished rows, with intervals of ± 0.05."""
    return Found(
        {
            "table": family, "row": f"head of {head}", "column": f"on {place}", "value": value, "low": value - 0.05,
            "high": value + 0.05,
        }
        for (head, place), value in rho.items()
    )  # fmt: skip


# ---- what is listed


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_every_head_is_listed_at_every_place(scale) -> None:
    cells = HEAD_TRANSFER.checked_cells(scale)
    places = {place for cell in cells for place in cell.places}
    for family in FAMILIES:
        names = [block.title for block in family.blocks()]
        for head in names:
            assert {Place(family.title, f"head of {head}", f"on {place}") for place in names} <= places
        assert {Place(family.title, MEAN_MAP, f"on {place}") for place in names} <= places
    assert len(places) == 6 * 13 + 4 * 9
    assert all(cell.forwards > 0 for cell in cells)


def test_the_depth_head_of_dinov2_is_absent_at_the_papers_scale_alone() -> None:
    def why(name: str) -> dict[str, str | None]:
        roles = {"photos": "/tmp", "photos-train": "/tmp"}
        scale = scale_of(name, models={"dinov2": "facebook/dinov2-small"}, data=roles)
        return {cell.key: scale.why_absent(cell) for cell in transfer_cells(scale)}

    small, paper = why("small"), why("paper")
    assert set(small.values()) == {None}
    assert paper["DINOv2: head of cls L10"] is None
    assert "one of DINOv2-S" in str(paper["DINOv2: head of cls L10, elsewhere"])
    assert "one of DINOv2-S" in str(paper["DINOv2: head of depth L4"])


# ---- verdicts


def test_another_decoder_at_the_same_layer_decides_the_first_claim() -> None:
    own = {(place, place): 0.9 for place in ("cls L3", "depth L3")}
    worse = own | {("cls L3", "depth L3"): 0.5, ("depth L3", "cls L3"): 0.5}
    assert DECODER(rows(worse)).word == "holds"
    assert "ρ 0.50 in place of 0.90" in DECODER(rows(worse)).why and "in 2 of 2 cases" in DECODER(rows(worse)).why
    assert DECODER(rows(worse | {("cls L3", "depth L3"): 0.85})).word == "holds partly"
    alike = {pair: 0.88 for pair in worse}
    assert DECODER(rows(alike)).word == "does not hold"
    assert DECODER(rows(own)).word == DECODER(rows({})).word == "not at this scale"
    assert LAYER(rows(worse)).word == "not at this scale"


def test_another_layer_of_the_same_decoder_decides_the_second() -> None:
    own = {(place, place): 0.9 for place in ("cls L4", "cls L10")}
    worse = own | {("cls L4", "cls L10"): 0.2, ("cls L10", "cls L4"): 0.3}
    assert LAYER(rows(worse, "DINOv2")).word == "holds"
    assert LAYER(rows(worse | {("cls L4", "cls L10"): 0.95}, "DINOv2")).word == "holds partly"
    assert LAYER(rows({pair: 0.9 for pair in worse}, "DINOv2")).word == "does not hold"
    assert LAYER(rows({})).word == "not at this scale"
    assert DECODER(rows(worse, "DINOv2")).word == "not at this scale"


# ---- a run


def test_a_run_reads_the_features_of_the_place_and_comes_to_the_same_bytes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "FAMILIES", (CUT,))
    monkeypatch.setattr(runner, "commit", lambda: "of today")
    short = replace(HEAD_TRANSFER, counts={"tiny": COUNTS})
    scale, cpu = SCALES["tiny"], torch.device("cpu")
    for folder in ("one", "two"):
        run_experiments([short], scale, tmp_path / folder, cpu, Progress())
    files = [tmp_path / folder / "head-transfer" / "rows.jsonl" for folder in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()
    known = {(row["row"], row["column"]): row for row in map(json.loads, files[0].open())}
    assert len(known) == 10 and all(-1 <= row["value"] <= 1 and row["count"] == 3 for row in known.values())

    shop = Workshop(short, scale, tmp_path / "one", cpu, Progress())
    pixels = shop.images("scenes", 3, model="tiny-scenes", size=56)
    there, (six, ten) = {}, CUT.blocks()
    for block in (six, ten):
        there[block] = shop.targets(block.probe(shop), "scenes", 3, size=56)["importance"]
    head, features = shipped_head(shop.backbone("tiny-scenes"), "cls", 6), ten.probe(shop).features(pixels)
    moved = spearman(head(features), there[ten]).mean()
    assert known["head of cls L6", "on cls L10"]["value"] == pytest.approx(float(moved), abs=1e-6)
    assert known["head of cls L6", "on cls L10"]["note"] == "the head that ships"
    assert known["head of cls L10", "on cls L6"]["note"] == "trained on 8 images"
    assert known["head of cls L6", "on cls L6"]["value"] > known["head of cls L6", "on cls L10"]["value"]
    assert known["exact importance of cls L6", "on cls L6"]["value"] == pytest.approx(1)
    shared = spearman(there[six], there[ten]).mean()
    assert known["exact importance of cls L6", "on cls L10"]["value"] == pytest.approx(float(shared), abs=1e-6)

    maps = there[ten] / there[ten].mean(1, keepdim=True)
    guesses = torch.stack([maps[[1, 2]].mean(0), maps[[0, 2]].mean(0), maps[[0, 1]].mean(0)])  # never of itself
    mean = spearman(guesses, there[ten]).mean()
    assert known[MEAN_MAP, "on cls L10"]["value"] == pytest.approx(float(mean), abs=1e-6)
