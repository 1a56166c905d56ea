"""Every experiment of the registry, without measuring anything: its lists, its claims on rows that lack something, and
the places in the paper that it names."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import pytest

from pullback.errors import PullbackError
from pullback.experiments.experiment import Cell, Claim, Experiment, Found, Place, Verdict
from pullback.experiments.registry import EXPERIMENTS, chosen, experiment
from pullback.experiments.scales import DATA, MODELS, SCALES, Scale, ScaleName

_LABELS = """
sec:background fig:overview sec:tractability eq:cv sec:structural inthm:rank_r thm:impossibility thm:convergence
sec:regime_taxonomy tab:regime_taxonomy sec:our_algorithm sec:naive_fails sec:spn eq:spn sec:randnla_training
sec:conformal_head eq:imp_target eq:conformal_loss sec:empirical_validation sec:vae_extension sec:token_pruning
eq:pruning_bound sec:soft_merge sec:hard_prune sec:pruning_results tab:cls_pruning tab:dpt_pruning sec:conclusion
sec:riemannian_review sec:pullback_vit sec:algorithms sec:algorithm_pseudocode alg:hutchinson alg:randnla
sec:theorem_proofs thm:captured_sensitivity prop:tractability eq:sensitivity_ratio thm:impossibility_formal
eq:impossibility_formal thm:convergence_formal eq:convergence_bound cor:ssm_quality cor:gsr thm:pruning
thm:pruning_formal eq:pruning_formal cor:opt_prune sec:pruning_details eq:dtask sec:full_sweep_results sec:multi_layer
tab:full_sweep tab:dpt_robustness tab:dpt_nyu_matched sec:dpt_full_sweep_2stage tab:dpt_nyu_2stage_336_448
sec:conformal_head_ablations tab:abl_rw tab:abl_arch tab:abl_budget sec:clip_cls_results tab:clip_cls_pruning
tab:clip_cls_wilcoxon sec:extra_baselines tab:extra_baselines sec:token_importance_visualizations fig:depth_importance
sec:spn_vae_validation tab:spn_vae_variants sec:task_retrieval eq:drm_seminorm eq:drm_geodesic eq:drm_sym
tab:depth_retrieval_indist tab:depth_retrieval_cross sec:glossary sec:limitations sec:discussion sec:future_work
"""
LABELS = _LABELS.split()
"""Every \\label of the paper."""
WORDS = ("holds", "holds partly", "does not hold", "not at this scale")
each = pytest.mark.parametrize("name", EXPERIMENTS)
each_scale = pytest.mark.parametrize("scale", SCALES)


def full(name: ScaleName) -> Scale:
    """A scale that has every role; nothing of it is ever opened."""
    return replace(SCALES[name], models={r: f"/{r}" for r in MODELS}, data={r: f"/{r}" for r in DATA})


def empty(name: ScaleName) -> Scale:
    return replace(SCALES[name], models={}, data={})


def rows_of(places: Iterable[Place], value: float | None) -> list[dict]:
    wide = {} if value is None else {"low": value - 0.1, "high": value + 0.1}
    about = {"value": value, "low": value, "high": value, **wide, "count": 200, "over": "images", "note": "a remark"}
    return [{**place._asdict(), **about} for place in places]


def places_of(cells: Iterable[Cell]) -> list[Place]:
    return [place for cell in cells for place in cell.places]


def sound(own: Experiment, found: Found) -> list[Verdict]:
    """The verdicts on these rows, each a word and a reason; footnotes are sentences or None."""
    verdicts = [claim.judge(found) for claim in own.claims]
    for verdict in verdicts:
        assert verdict.word in WORDS and is_text(verdict.why)
    for note in (footnote(found) for footnote in own.footnotes):
        assert note is None or is_text(note)
    return verdicts


def is_text(said: str) -> bool:
    return bool(said) and said == said.strip() and not re.search(r"\bnan\b|\bNone\b(?! of)", said)


# Lists


@each
def test_it_has_the_name_that_it_is_found_by(name: str) -> None:
    own = experiment(name)
    assert own.name == name and own.title and own.about.endswith(".") and own.claims


@each
@each_scale
@pytest.mark.parametrize("roles", [full, empty], ids=["all roles", "no roles"])
def test_its_cells_are_valid_at_every_scale(name: str, scale: ScaleName, roles) -> None:
    own, asked = experiment(name), roles(scale)
    for cell in own.checked_cells(asked):
        assert cell.key and cell.places, cell
        assert cell.model in {"", *MODELS} and cell.data in {"", *DATA}
        assert set(cell.needs) <= {*MODELS, *DATA}
        assert math.isfinite(cell.forwards) and cell.forwards >= 0
        lacking = asked.why_absent(cell)
        assert lacking is None or lacking.startswith("not at this scale: ")
        assert (lacking is not None) == (bool(cell.roles and roles is empty) or cell.absent is not None), cell.key


@each
@each_scale
def test_its_list_is_the_same_whenever_it_is_made(name: str, scale: ScaleName) -> None:
    """A run that goes on finds its rows by the keys and places of cells."""
    own = experiment(name)
    for roles in (full, empty):
        first, second = ([(cell.key, cell.places) for cell in own.cells(roles(scale))] for _ in range(2))
        assert first == second


@each
def test_its_counts_and_columns_and_figures_are_those_of_a_report(name: str) -> None:
    own = experiment(name)
    assert set(own.counts) in ({*SCALES}, set())
    assert all(counts.keys() >= own.counts["tiny"].keys() for counts in own.counts.values()), "a scale lacks a count"
    assert all(type(count) is int and count >= 0 for counts in own.counts.values() for count in counts.values())
    columns = [column.name for column in own.columns]
    assert len(set(columns)) == len(columns)
    figures = [figure.name for figure in own.figures]
    assert len(set(figures)) == len(figures)
    for figure in own.figures:
        assert figure.kind != "scatter" or {figure.x, figure.y} <= set(columns)
        assert figure.table or figure.kind not in ("curves", "scatter")
    json.dumps([asdict(part) for part in (*own.columns, *own.figures)])
    used = {place.column for place in places_of(own.cells(full("paper")))}
    assert set(columns) <= used, "a column that no place has"
    for place, value in own.paper.items():
        assert isinstance(value, str) or math.isfinite(value), place


# Claims and footnotes


@each
def test_claims_and_footnotes_say_nothing_where_there_is_nothing(name: str) -> None:
    own = experiment(name)
    absent = rows_of(places_of(own.cells(empty("tiny"))), None)
    for found in (Found([]), Found(absent)):
        assert [verdict.word for verdict in sound(own, found)] == ["not at this scale"] * len(own.claims)
        assert [footnote(found) for footnote in own.footnotes] == [None] * len(own.footnotes)


@each
@pytest.mark.parametrize("value", [0.5, 3.0])
def test_claims_are_decided_where_everything_was_measured(name: str, value: float) -> None:
    own = experiment(name)
    cells = [cell for cell in own.cells(full("paper")) if cell.absent is None]
    verdicts = sound(own, Found(rows_of(places_of(cells), value)))
    undecided = [
        claim.sentence for claim, said in zip(own.claims, verdicts, strict=True) if said.word == "not at this scale"
    ]
    assert not undecided


def holes(cells: list[Cell]) -> Iterator[list[Place]]:
    """Places that were measured: of the cells of one model, of one cell, and all but a few that are no numbers."""
    for model in {cell.model for cell in cells}:
        yield places_of(cell for cell in cells if cell.model == model)
    for cell in cells:
        yield list(cell.places)
    for one, other in combinations(range(3), 2):
        yield [place for at, place in enumerate(places_of(cells)) if at % 3 in (one, other)]
    places = places_of(cells)
    for step in (2, 5, 7, 11):
        for first in range(step):
            yield [place for at, place in enumerate(places) if at % step != first]


@each
@pytest.mark.parametrize("value", [1e-3, 0.7])
def test_no_number_that_is_missing_stops_the_judges(name: str, value: float) -> None:
    """Of a role that the scale lacks, or of what was not a finite number."""
    own = experiment(name)
    for measured in holes([cell for cell in own.cells(full("small")) if cell.absent is None]):
        sound(own, Found(rows_of(measured, value)))


# The paper


@each
def test_it_names_labels_of_the_paper(name: str) -> None:
    own = experiment(name)
    assert own.paper_label in LABELS
    assert {claim.where for claim in own.claims} <= set(LABELS)
    assert all(is_sentence(claim) for claim in own.claims)
    assert len({claim.sentence for claim in own.claims}) == len(own.claims)


def is_sentence(claim: Claim) -> bool:
    return claim.sentence.rstrip(")").endswith(".") and len(claim.sentence.split()) > 3


@pytest.mark.weights("paper/task_induced_metrics.tex")
def test_the_labels_are_those_of_the_paper(shared: Path) -> None:
    text = (shared / "paper" / "task_induced_metrics.tex").read_text(encoding="utf-8")
    assert list(dict.fromkeys(re.findall(r"\\label\{([^}]*)\}", text))) == LABELS


# Names


def test_experiments_are_chosen_by_their_names_each_once() -> None:
    assert [own.name for own in chosen("all")] == list(EXPERIMENTS)
    assert [own.name for own in chosen("accuracy, taxonomy,accuracy")] == ["accuracy", "taxonomy"]


@pytest.mark.parametrize("name", ["taxonomie", "", "all,taxonomy", "taxonomy,"])
def test_a_name_that_is_none_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(
        PullbackError, match=r"experiment: expected all or one of taxonomy, full-sweep, .*overview, got"
    ):
        chosen(name)
