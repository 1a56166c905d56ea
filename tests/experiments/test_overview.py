"""The overview: distances against dense metrics, moved tokens against loops, verdicts, and figures for a page."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from pullback.experiments import overview as module
from pullback.experiments.experiment import Found, Verdict
from pullback.experiments.overview import (
    ALL_PRODUCTS,
    BY_COSINE,
    BY_TASK,
    CAMERA,
    CLS_L10,
    DA_L02,
    K20,
    LESS,
    MAP,
    NEAR,
    OURS,
    OVERVIEW,
    PHOTOS,
    PHOTOS_DA,
    PRODUCTS,
    SCENES,
    apart,
    changes,
    cosine_distances,
    front,
    nearest,
    shared_quarter,
    task_distances,
)
from pullback.experiments.run import run_experiments
from pullback.experiments.scales import SCALES, Scale
from pullback.operators import LowRankMetric
from pullback.probes import load_probe
from pullback.pruning.matching import match_by_task
from pullback.report.panels import QUALITIES, Album, panel_of
from pullback.runs.files import read_arrays
from pullback.runs.progress import Progress
from pullback.scenes.render import normalised, render


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_the_cells_of_every_scale_are_valid(scale: Scale) -> None:
    cells = OVERVIEW.checked_cells(scale)
    assert {"maps, tiny-scenes, scenes", "nearest, tiny-scenes, scenes"} <= {
        cell.key for cell in cells if scale.why_absent(cell) is None
    }


def test_the_figures_show_photographs_where_there_are_some(tmp_path: Path) -> None:
    tiny, small, paper = (SCALES[name] for name in ("tiny", "small", "paper"))

    def given(scale: Scale, *models: str) -> Scale:
        return replace(scale, models={**scale.models, **dict.fromkeys(models, "x")}, data={**scale.data, "photos": "x"})

    assert front(tiny) == front(small) == front(paper) == SCENES
    assert front(given(small, "dinov2")) == PHOTOS
    assert front(given(paper)) == PHOTOS_DA
    without_da = {role: name for role, name in paper.models.items() if role != "depth-anything"}
    assert front(given(replace(paper, models=without_da))) == SCENES  # no depth head is of DINOv2-B


# Distances


def some_metric(tokens: int = 6, dim: int = 4, rank: int = 3) -> tuple[LowRankMetric, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(tokens * dim, rank, generator=drawn, dtype=torch.float64)).Q
    energies = torch.tensor([[5.0, 2.0, 0.5]], dtype=torch.float64)
    features = torch.randn(1, tokens, dim, generator=drawn, dtype=torch.float64)
    return LowRankMetric(basis.T.reshape(1, rank, tokens, dim), energies), features


def test_d_task_is_that_of_the_dense_metric_of_the_first_token() -> None:
    metric, tokens = some_metric()
    blocks = metric.token_blocks()[0]  # Q_a, [N, D, D]
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for a in range(6):
        for b in range(6):
            difference = tokens[0, a] - tokens[0, b]
            expected[a, b] = (difference @ blocks[a] @ difference).sqrt()
    found = task_distances(metric, tokens)[0]
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, found.T)


def test_the_nearest_by_d_task_is_the_one_that_a_merge_takes() -> None:
    metric, tokens = some_metric()
    found = nearest(task_distances(metric, tokens)[0], 5)
    for token in range(6):
        kept = torch.tensor([[other for other in range(6) if other != token]])
        modes = metric.token_factors().transpose(1, 2)
        place, _ = match_by_task(tokens, modes, kept, torch.tensor([[token]]), prefix=0)
        assert found[token, 0] == kept[0, place[0, 0]]


def test_the_nearest_come_in_order_and_are_never_the_token_itself() -> None:
    line = torch.tensor([0.0, 1.0, 3.0, 7.0])
    distances = (line[:, None] - line).abs()
    assert nearest(distances, 2).tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]
    assert nearest(torch.zeros(3, 3), 2).tolist() == [[1, 2], [0, 2], [0, 1]]


def test_cosine_ignores_length() -> None:
    tokens = torch.tensor([[[1.0, 0.0], [5.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]])
    torch.testing.assert_close(cosine_distances(tokens)[0, 0], torch.tensor([0.0, 0.0, 1.0, 2.0]))


def test_patches_are_apart_by_rows_and_columns() -> None:
    partners = torch.tensor([[1, 0, 5, 2, 4, 0]])  # in a grid of 2 x 3
    expected = (1 + 1 + 1 + 5**0.5 + 0 + 5**0.5) / 6
    assert apart(partners, (2, 3)).item() == pytest.approx(expected)


def test_a_quarter_is_shared_by_as_many_as_both_have_highest() -> None:
    first = torch.arange(8.0)[None].repeat(3, 1)
    second = torch.stack([first[0], first[0].flip(0), torch.tensor([0.0, 1, 2, 3, 4, 9, 5, 8])])
    assert shared_quarter(first, second).tolist() == [1.0, 0.0, 0.5]


# Moved tokens


@pytest.mark.parametrize("decoder", ["cls", "depth-2x2"])
def test_changes_are_those_of_outputs_with_one_token_moved(decoder: str) -> None:
    probe = load_probe("tiny-scenes", decoder, 8, device="cpu")
    features = probe.features(normalised(render([3], size=56).rgb[:, 0]), normalized=True)
    chosen, partners = torch.tensor([2, 9, 16]), torch.tensor([[5, 5, 5], [2, 9, 16]])
    plain, run = features.as_subclass(torch.Tensor), probe.bind(features)
    for step in (1.0, 0.1):
        found = changes(probe, features, chosen, partners, step)
        expected = []
        for token in chosen.tolist():
            moved = plain.clone()
            moved[0, token] += step * (plain[0, 5] - plain[0, token])
            expected.append((run(moved) - run(plain)).norm() / run(plain).norm())
        torch.testing.assert_close(found[0], 100 * torch.stack(expected).mean(), rtol=1e-3, atol=1e-4)
        assert found[0] > 100 * found[1]  # a token that stays changes nothing


# Verdicts


def row(table: str, name: str, column: str, value: float, width: float = 0.0) -> dict:
    return {"table": table, "row": name, "column": column, "value": value, "low": value - width, "high": value + width}


def judged(judge, *rows: dict) -> Verdict:
    return judge(Found(rows))


def test_products_are_compared_with_those_that_give_all_of_j() -> None:
    def taken(subject, products: float, everything: float) -> list[dict]:
        return [row(MAP, subject.row, PRODUCTS, products), row(MAP, subject.row, ALL_PRODUCTS, everything)]

    judge = module.cheaper_than_all
    assert judged(judge).word == "not at this scale"
    assert judged(judge, *taken(CLS_L10, 200, 768), *taken(DA_L02, 200, 50_176)).word == "holds"
    assert judged(judge, *taken(CLS_L10, 200, 768), *taken(CAMERA, 145, 9)).word == "holds partly"
    assert judged(judge, *taken(CAMERA, 145, 9)).word == "does not hold"
    mixed = judged(judge, *taken(CLS_L10, 200, 768), *taken(OURS[0], 200, 192), *taken(OURS[2], 200, 12_480))
    assert mixed.word == "holds" and OURS[0].row not in mixed.why and OURS[2].row in mixed.why
    note = module.few_outputs(Found(taken(CLS_L10, 200, 768) + taken(OURS[0], 200, 192)))
    assert note is not None and OURS[0].row in note and CLS_L10.row not in note
    assert module.few_outputs(Found(taken(CLS_L10, 200, 768))) is None


def test_most_of_the_energy_is_judged_by_the_interval() -> None:
    judge = module.decays_rapidly
    assert judged(judge).word == "not at this scale"
    low, high = row(MAP, CLS_L10.row, K20, 0.33, 0.02), row(MAP, DA_L02.row, K20, 0.96, 0.02)
    assert judged(judge, high).word == "holds"
    assert judged(judge, low, high).word == "holds partly"
    assert judged(judge, low).word == judged(judge, row(MAP, CLS_L10.row, K20, 0.55, 0.1)).word == "does not hold"


def test_d_task_must_change_less_than_cosine_beyond_the_noise() -> None:
    def near(name: str, less: float) -> list[dict]:
        return [
            row(NEAR, name, BY_TASK, 1.0 + less), row(NEAR, name, BY_COSINE, 1.0), row(NEAR, name, LESS, less, 0.1),
        ]  # fmt: skip

    judge = module.nearer_to_the_task
    scenes = partial(near, f"{SCENES.title}, depth")
    assert judged(judge).word == "not at this scale"
    assert judged(judge, *scenes(-0.5)).word == "holds"
    assert judged(judge, *scenes(-0.05)).word == "does not hold"
    assert judged(judge, *scenes(-0.5), *near(f"{SCENES.title}, class token", 0.5)).word == "holds partly"
    photos = judged(judge, *scenes(-0.5), *near(f"{PHOTOS.title}, depth", 0.5))
    assert photos.word == "does not hold" and SCENES.title not in photos.why


# A run


def test_a_run_writes_rows_and_figures_and_comes_out_the_same_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"images": 2, "dense": 1, "scenes": 1, "size": 56, "view size": 56, "pictures": 2, "replaced": 4}
    monkeypatch.setitem(module.COUNTS, "tiny", counts)
    monkeypatch.setattr(module, "LAYER", 9)
    monkeypatch.setattr(module, "SHOWN", (replace(SCENES, cells=2),))
    wanted = (OURS[0].row, "maps, ", "nearest, ", "before and after, ")
    small = replace(
        OVERVIEW, paper={}, cells=lambda scale: [own for own in module.cells(scale) if own.key.startswith(wanted)]
    )
    written = []
    for out in (tmp_path / "one", tmp_path / "two"):
        document = run_experiments([small], SCALES["tiny"], out, torch.device("cpu"), Progress())[0]
        written.append((out / "overview" / "rows.jsonl").read_bytes())
    assert written[0] == written[1]
    rows = [json.loads(line) for line in written[0].splitlines()]
    assert all(one["value"] is not None for one in rows)
    values = {(one["row"], one["column"]): one for one in rows}
    tokens, outputs = (values[OURS[0].row, name]["value"] for name in ("N", "M"))
    assert (tokens, outputs) == (17, 192) and values[OURS[0].row, "entries of g"]["value"] == (17 * 192) ** 2
    assert values[OURS[0].row, PRODUCTS]["value"] == 100 + 20 * 3 + 20 * 2  # m + r (q + 1) JVPs, and r q VJPs
    assert values["tiny-scenes, scenes: paper", "additional SILog × 100"]["value"] > 0
    assert {claim["word"] for claim in document["claims"]} <= {"holds", "holds partly", "does not hold"}
    assert_figures(out / "overview" / "arrays")


def assert_figures(folder: Path) -> None:
    found = {figure.name: read_arrays(folder / f"{figure.name}.npz") for figure in OVERVIEW.figures}
    shown = {
        figure.name: panel_of(figure.kind, found[figure.name], Album(QUALITIES[0]))
        for figure in OVERVIEW.figures
        if figure.kind != "spectrum"
    }
    assert all(len(panel["pictures"]) == 2 for panel in shown.values())
    maps = found["maps"]
    assert maps["maps"].shape == (3, 2, 4, 4) and np.isnan(maps["rho"][0]).all()
    assert not np.array_equal(maps["maps"][0], maps["maps"][1])
    near = found["neighbours"]
    assert near["nearest"].shape == (3, 2, 16, 5)
    assert not (near["nearest"] == np.arange(16)[:, None]).any()
    assert list(found["spectrum"]) == [OURS[0].row]
    paper, ours = found["depth-paper"], found["depth-ours"]
    assert np.array_equal(paper["before"], ours["before"]) and not np.allclose(paper["after"], ours["after"])
