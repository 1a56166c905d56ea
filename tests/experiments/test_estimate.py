"""What an experiment would take: operations against counted ones, and what is said where something is not known."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pullback.backbones.loading import load_any_backbone
from pullback.experiments.estimate import RATES, SHAPES, Shape, estimates, shape_of
from pullback.experiments.experiment import Cell, Column, Experiment, Place
from pullback.experiments.registry import experiment
from pullback.experiments.scales import SCALES, Scale
from pullback.report.console import console
from pullback.report.experiments_console import duration, plan_table

CPU = torch.device("cpu")


def cell(key: str, forwards: float, model: str = "tiny-scenes", count: int = 1, **others) -> Cell:
    places = tuple(Place("t", f"{key} {number}", "x") for number in range(count))
    return Cell(key, places, lambda shop: [], model, "scenes", forwards=forwards, **others)


def toy(*cells: Cell) -> Experiment:
    return Experiment("toy", "A toy", "tab:toy", "Of cells.", (Column("x"),), lambda scale: list(cells))


def planned(*cells: Cell, scale: Scale = SCALES["tiny"], device: torch.device = CPU) -> dict:
    (found,) = estimates([toy(*cells)], scale, device)["experiments"]
    return found


# Shapes


def test_operations_are_those_that_are_counted() -> None:
    backbone = load_any_backbone("tiny-scenes")
    plainly = sdpa_kernel(SDPBackend.MATH)  # a fused attention is not counted
    with plainly, FlopCounterMode(display=False) as counted, torch.no_grad():
        backbone.features(torch.zeros(1, 3, 224, 224), [11])
    assert SHAPES["tiny-scenes"].operations == pytest.approx(counted.get_total_flops(), rel=0.05)


@pytest.mark.parametrize("name", ["tiny-scenes", "tiny-views"])
def test_shapes_of_embedded_models_are_theirs(name: str) -> None:
    backbone, shape = load_any_backbone(name), SHAPES[name]
    parameters = sum(own.numel() for own in backbone.model.parameters())
    assert shape.parameters == pytest.approx(parameters, rel=0.5), "of the blocks alone"
    assert (backbone.depth, backbone.dim) == (12, 192) if name == "tiny-scenes" else shape.width == 128


def test_every_model_that_a_scale_names_has_a_shape() -> None:
    for scale in SCALES.values():
        assert all(shape_of(name) is not None for name in scale.models.values())
    assert SHAPES["facebook/VGGT-1B"].parameters == pytest.approx(0.6e9, rel=0.2), "of the blocks, without heads"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"patch_size": 14, "num_hidden_layers": 12, "hidden_size": 384}, Shape(12, 384, 257)),
        ({"vision_config": {"patch_size": 16, "num_hidden_layers": 12, "hidden_size": 768}}, Shape(12, 768, 197)),
        ({"patch_size": 14, "hidden_size": 384}, None),
        ({"patch_size": [14, 14], "num_hidden_layers": 12, "hidden_size": 384}, None),
    ],
)
def test_a_model_in_a_folder_is_known_by_its_configuration(tmp_path: Path, config: dict, wanted: Shape | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(str(tmp_path)) == wanted
    assert shape_of("someone/a-model") is None


# Estimates


def test_time_is_that_of_the_forwards_of_all_measured_cells() -> None:
    absent = cell("never", 1e9, absent="no weights")
    lacking = cell("of the paper", 1e9, "dinov2", 3)
    found = planned(cell("a", 10), cell("b", 30, "tiny-views"), cell("c", 0), absent, lacking)
    operations = 10 * SHAPES["tiny-scenes"].operations + 30 * SHAPES["tiny-views"].operations
    assert found["seconds"] == pytest.approx(operations / RATES["cpu"])
    assert (found["cells"], found["numbers"], found["absent"]) == (3, 3, 4)
    assert found["why"] == ["not at this scale: no weights", "not at this scale: it has no dinov2"]
    on_gpu = planned(cell("a", 10), device=torch.device("cuda"))["seconds"]
    assert on_gpu == pytest.approx(10 * SHAPES["tiny-scenes"].operations / RATES["cuda"])


def test_memory_is_that_of_the_largest_model() -> None:
    small, both = planned(cell("a", 1)), planned(cell("a", 1), cell("b", 1, "tiny-views"))
    shape = SHAPES["tiny-scenes"]
    features = 64 * shape.blocks * shape.tokens * shape.width
    assert small["bytes"] == 4 * (shape.parameters + 4 * features) and both["bytes"] >= small["bytes"]
    assert planned(cell("a", 1, absent="no weights"))["bytes"] == 0


def test_an_unknown_model_makes_the_time_unknown_and_only_where_it_works() -> None:
    scale = replace(SCALES["tiny"], models={"dinov2": "someone/a-model", "tiny-scenes": "tiny-scenes"})
    assert planned(cell("a", 1), cell("b", 1, "dinov2"), scale=scale)["seconds"] is None
    assert planned(cell("a", 1), cell("b", 0, "dinov2"), scale=scale)["seconds"] > 0
    shown = said(estimates([toy(cell("b", 1, "dinov2"))], scale, CPU))
    assert "unknown" in shown.lower() or "–" in shown


def said(document: dict) -> str:
    screen = console()
    with screen.capture() as captured:
        screen.print(plan_table(document), width=200)
    return captured.get()


def test_the_table_of_a_dry_run_has_a_line_for_each_experiment_and_the_reasons_once() -> None:
    names = ("taxonomy", "full-sweep", "cls-pruning")
    found = estimates([experiment(name) for name in names], SCALES["tiny"], CPU)
    shown = said(found)
    assert all(name in shown for name in names) and "scale tiny on cpu" in shown
    assert shown.count("not at this scale: it has no dinov2 and no photos\n") <= 1
    assert "models: tiny-scenes = tiny-scenes" in shown
    for own in found["experiments"]:
        assert own["cells"] and own["numbers"] and own["absent"] and 1 < own["seconds"] < 3600
        assert all(reason.startswith("not at this scale: ") for reason in own["why"])
    total = sum(own["seconds"] for own in found["experiments"])
    assert f"together about {duration(total)}" in shown


@pytest.mark.parametrize(
    ("seconds", "written"), [(2.5, "2.5 s"), (90, "1.5 min"), (5400, "1.5 h"), (2 * 86400, "2 days"), (0.0, "0 s")]
)
def test_durations_are_written_in_the_unit_that_fits(seconds: float, written: str) -> None:
    assert duration(seconds) == written


def test_more_is_more_at_every_scale() -> None:
    for name in ("taxonomy", "multi-layer", "cls-pruning", "accuracy"):
        times = []
        for scale in SCALES.values():
            models = {**SCALES["paper"].models, "dinov2": "facebook/dinov2-base"}
            data = {role: "/x" for role in ("photos", "photos-train", "photos-bank", "sketches")} | dict(scale.data)
            (own,) = estimates([experiment(name)], replace(scale, models=models, data=data), CPU)["experiments"]
            times.append(own["seconds"])
        assert times == sorted(times) and math.isfinite(times[-1]), name
