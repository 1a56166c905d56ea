"""VGGT's rows of the taxonomy on procedural scenes: against dense matrices, and a command that goes on after a stop."""

import json

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

import pullback as pb
from helpers.vggt_models import tiny
from pullback.backbones import load_any_backbone
from pullback.errors import PullbackError
from pullback.experiments import scene_taxonomy as module
from pullback.experiments.scene_taxonomy import (
    PAPER,
    Configuration,
    Settings,
    configurations,
    draw_scenes,
    measure,
    multiplicity_products,
    numerical_ranks,
    table,
    taxonomy_rows,
)
from pullback.operators import JacobianOperator
from pullback.scenes.splits import HELD_OUT

SIZE, VIEWS = 28, 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def backbone():
    return load_any_backbone(tiny().requires_grad_(False))


@pytest.fixture(scope="module")
def images():
    return draw_scenes(range(HELD_OUT, HELD_OUT + 2), size=SIZE, views=VIEWS, device=CPU).double()


def dense(configuration, backbone, images):
    probe = configuration.probe(backbone)
    return JacobianOperator(probe, probe.features(images)).dense()


@pytest.mark.parametrize("layer", [1, None])
@pytest.mark.parametrize(("decoder", "size"), [("camera", 9 * VIEWS), ("camera-1", 9)])
def test_the_camera_has_at_most_nine_directions_a_view(backbone, images, decoder, size, layer):
    own = Configuration(decoder, layer)
    row = measure(own, backbone, images, rank=20, exact=backbone)
    matrices = dense(own, backbone, images)
    truth = [int(torch.linalg.matrix_rank(matrix)) for matrix in matrices]
    assert row["jacobian_rank"] == {"least": min(truth), "most": max(truth), "bound": size} and max(truth) <= size
    assert matrices.shape[1] == row["output_size"] == row["rank_used"] == size
    assert row["kappa"] == pytest.approx(1) and row["regime"] == "iv" and row["r_eff_slq"] <= size
    assert row["products"]["rank"] == {"jvp": 0, "vjp": 2 * size}, "two scenes"
    assert row["products"]["total"]["vjp"] == 4 * size and "k_eff" not in row


def test_a_row_says_what_the_dense_spectrum_says(backbone, images):
    own = Configuration("depth-2x2", 1)
    row = measure(own, backbone, images, rank=3)
    energies = torch.linalg.svdvals(dense(own, backbone, images)).square()
    shares = energies / energies.sum(1, keepdim=True)
    kappa = shares[:, :3].sum(1)
    assert row["kappa"] == pytest.approx(kappa.mean().item())
    assert row["kappa_se"] == pytest.approx(kappa.std().item() / 2**0.5) and row["kappa_estimation_se"] < 1e-5
    assert row["r_eff_slq"] == pytest.approx(torch.special.entr(shares).sum(1).exp().mean().item(), rel=1e-5)
    assert (row["output_size"], row["dim"]) == (4 * VIEWS, 32) and row["paper"] is None
    assert "jacobian_rank" not in row and row["products"]["total"] == row["products"]["diagnosis"]
    json.dumps(row, allow_nan=False)


def test_at_x_vis_the_independent_layers_are_counted_and_so_are_their_products(backbone, images):
    own = Configuration("depth-2x2", None, "depth")
    row = measure(own, backbone, images[:1], rank=3)
    expected = pb.layer_multiplicity(own.probe(backbone), images[:1])
    assert row["k_eff"] == pytest.approx(expected.value.item()) and row["layers"] == [0, 1, 2, 3]
    assert row["dim"] == 4 * 2 * 32 and row["kappa"] < row["kappa_50"] == pytest.approx(1)
    assert row["products"]["k_eff"] == {"jvp": 64, "vjp": 16}
    assert row["paper"] == PAPER["depth", "x_vis"]


def test_the_products_of_k_eff_are_those_that_are_spent(backbone, images, monkeypatch):
    spent = []
    original = JacobianOperator._apply

    def counted(self, product, stack):
        spent.append((product, stack.shape[1]))
        return original(self, product, stack)

    monkeypatch.setattr(JacobianOperator, "_apply", counted)
    pb.layer_multiplicity(Configuration("depth-2x2", None).probe(backbone), images[:1])
    count = multiplicity_products(1, 4)
    assert sum(size for product, size in spent if product == "pushforward") == count.jvp
    assert sum(size for product, size in spent if product == "pullback") == count.vjp


def test_ranks_are_counted_scene_by_scene(backbone, images):
    ranks, products = numerical_ranks(Configuration("points-2", 1).probe(backbone), images)
    assert ranks == [6, 6] and (products.jvp, products.vjp) == (0, 12)


def test_every_decoder_is_read_at_a_layer_and_at_the_head():
    found = [(own.decoder, own.at) for own in configurations(4, 2)]
    assert found == [
        (decoder, at) for decoder in ("camera", "camera-1", "points", "depth-8x8") for at in ("layer", "x_vis")
    ]
    assert [own.decoder for own in configurations(4, 3, view=0, full_depth=True)][2:10:6] == ["camera-0", "depth"]
    stated = {(own.paper, own.at) for own in configurations(4, 2, full_depth=True) if own.in_paper()}
    assert stated == set(PAPER), "each number of the paper stands beside one row"


def test_scenes_are_those_of_their_seeds_whatever_the_batch():
    seeds = range(HELD_OUT, HELD_OUT + 3)
    scenes = draw_scenes(seeds, size=8, views=2, device=CPU, batch=2)
    assert scenes.shape == (3, 2, 3, 8, 8)
    assert torch.equal(scenes, draw_scenes(seeds, size=8, views=2, device=CPU))


@pytest.fixture
def two_rows(monkeypatch):
    """The command's own rows take minutes on a CPU."""
    rows = [Configuration("camera-1", 1, "camera of a view"), Configuration("points-2", None, "points")]
    monkeypatch.setattr(module, "configurations", lambda layer, views, **options: rows)


def test_the_command_writes_rows_and_goes_on_after_a_stop(tmp_path, two_rows, monkeypatch):
    model, out = tiny(torch.float32).save_pretrained(tmp_path / "toy"), tmp_path / "rows.jsonl"
    app = Typer()
    app.command()(module.main)
    options = ["--model", str(model), "--scenes", "1", "--size", "28", "--rank", "4", "--device", "cpu"]
    run = CliRunner().invoke(app, [*options, "--out", str(out)])
    assert run.exit_code == 0, run.output
    lines = out.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["decoder"], row["at"], row["probe"]) for row in rows] == [
        ("camera-1", "layer", "toy camera-1 L01"),
        ("points-2", "x_vis", "toy points-2 taps [0, 1, 2, 3]"),
    ], "no folder of this machine"
    for text in ("camera-1 L01", "paper L16", "points-2 x_vis", "212", "≫ 100", "K_eff"):
        assert text in run.output

    measured = []
    monkeypatch.setattr(module, "measure", lambda own, *rest, **more: measured.append(own) or {"new": True})
    out.write_text(lines[0] + "\n" + lines[1][:40])  # killed in the middle of a row
    again = list(taxonomy_rows(str(model), Settings(scenes=1, size=28, rank=4), device="cpu", out=out))
    assert again[0] == rows[0] and again[1]["new"] and [own.decoder for own in measured] == ["points-2"]
    list(taxonomy_rows(str(model), Settings(scenes=1, size=28, rank=5), device="cpu", out=out))
    assert len(measured) == 3 and len(out.read_text().splitlines()) == 4, "another rank is another measurement"


def test_mistakes_are_named(tmp_path):
    with pytest.raises(PullbackError, match="view: expected one of the 2 views, 0 to 1, got 2"):
        next(taxonomy_rows("nowhere", Settings(views=2, view=2)))
    model = tiny(torch.float32).save_pretrained(tmp_path / "toy")
    with pytest.raises(PullbackError, match="layer: expected a layer of the aggregator from 0 to 3"):
        next(taxonomy_rows(str(model), Settings(layer=9), device="cpu"))


def test_what_a_row_does_not_have_is_a_dash_and_what_is_no_number_is_null(backbone, images):
    row = measure(Configuration("camera-1", None), backbone, images[:1], rank=4)
    shown = table([{**row, "decoder": "camera-1", "layer": None, "scenes": 1}])
    cells = {column.header: list(column.cells) for column in shown.columns}
    assert shown.row_count == 1 and cells["probe"] == ["camera-1 x_vis"] and cells["K_eff"] == ["–"]
    assert module.number(float("nan")) is None and module.number(1 / 3) == 0.333333333
