"""All methods at their operating points: rows that resume exactly, tuned models apart, summaries that are checked by
hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import pullback as pb
from pullback.backbones import load_backbone
from pullback.decoders import build_decoder
from pullback.errors import DecoderError, FileError, PullbackError
from pullback.evaluation.neighbours import leave_one_out
from pullback.evaluation.statistics import mcnemar_p, wilcoxon_p
from pullback.experiments.demo import write_pictures
from pullback.pruning import pareto
from pullback.pruning.frontier import best_within, frontiers
from pullback.pruning.operating_points import Grid, Key, Knobs, scores_by_block
from pullback.pruning.pareto import ParetoRequest, run_pareto
from pullback.pruning.rules import Subject
from pullback.pruning.tuned import TunedVectors
from pullback.runs.progress import Progress
from pullback.scenes.render import render

SIZE = 56
FEW = Knobs(sizes=(42,), r=(1,), keep=(0.9,), evit_keep=(0.5,), ratios=(0.5,), stages=((3,), (3, 6)), smaller=1)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Five pictures of two classes, in folders and in a table, and a file that is no picture."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(5):
        write_pictures(render([number], size=64), folder / f"class-{number % 2}" / str(number))
    (folder / "class-0" / "00-broken.png").write_bytes(b"not a picture")
    return folder


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    return load_backbone("tiny-scenes", device="cpu").model


@pytest.fixture(scope="module")
def folders(network, tmp_path_factory) -> dict[str, Path]:
    """Pruned models on disk: frozen, tuned, tuned rival, and one of other weights."""
    root = tmp_path_factory.mktemp("plans")

    def tuned(pruned: pb.PrunedModel, scale: float) -> pb.PrunedModel:
        vectors = {name: scale * value for name, value in network.named_parameters() if value.ndim == 1}
        return pruned.with_vectors(TunedVectors(vectors, {"steps": 1}))

    ours, smaller = pb.prune(network, "norm", ratio=0.5, stages=[3], dense=True), pb.prune(network, preset="tome", r=1)
    other = load_backbone("tiny-scenes", device="cpu").model
    with torch.no_grad():
        next(value for name, value in other.named_parameters() if value.ndim == 2 and "layer" in name)[0, 0] += 1
    models = {
        "half": ours,
        "half-tuned": tuned(ours, 1.001),
        "tome-tuned": tuned(smaller, 1.002),
        "foreign": pb.prune(other, "norm", ratio=0.5, stages=[3]),
    }
    return {name: model.save_pretrained(root / name) for name, model in models.items()}


def request(photos: Path, **changes) -> ParetoRequest:
    settings = {"knobs": FEW, "size": SIZE, "device": "cpu", "batch": 2, "time": "none", "budgets": (0.9, 0.6)}
    return ParetoRequest(model="tiny-scenes", images=str(photos), **(settings | changes))


def run(photos: Path, out: Path, **changes) -> dict:
    return run_pareto(request(photos, **changes), out, Progress())


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in [out / "rows.jsonl", *out.glob("embeddings/*")]}


@pytest.fixture(scope="module")
def compared(photos, tmp_path_factory) -> tuple[dict, Path]:
    out = tmp_path_factory.mktemp("pareto") / "new"
    return run(photos, out, neighbours=(1, 2)), out


def test_every_method_has_its_points_and_every_point_its_rows(compared):
    document, out = compared
    assert [(entry["method"], entry["point"]) for entry in document["points"]] == [
        ("resize", "42 px"), ("tome", "r = 1"), ("tome, decreasing", "r = 1"), ("pitome", "keep 0.9"),
        ("evit", "keep 0.5"), ("best", "block 3, 0.5"), ("best", "blocks 3, 6, 0.5"), ("best", "block 3, 0.5, 42 px"),
    ]  # fmt: skip
    assert [entry["ours"] for entry in document["points"]] == 5 * [False] + 3 * [True]
    found = rows(out)
    assert len(found) == 5 * (1 + len(document["points"]))
    for row in found:
        assert set(row) == {
            "model", "weights", "commit", "seed", "decoder", "method", "point", "tuned", "plan", "scores", "measure",
            "image", "value",
        }  # fmt: skip
    plans = {(row["method"], row["point"]): row["plan"] for row in found}
    assert plans["tome, decreasing", "r = 1"]["merged"] == [2, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert plans["best", "block 3, 0.5, 42 px"]["size"] == 42
    assert all(plan["class_row"] for (method, _), plan in plans.items() if method != "unpruned")
    assert document["skipped"][0]["file"].endswith("00-broken.png") and document["images_compared"] == 5
    assert "chosen on these same images" in document["selection"]


def test_the_numbers_are_those_of_pb_prune(compared, network, photos):
    """The class row changes operations and nothing else."""
    document, out = compared
    probe = pb.load_probe("tiny-scenes", "cls", device="cpu")
    read = probe.read_images(str(photos), SIZE)
    with torch.no_grad():
        full = network(read.pixels).embedding
        merged = pb.prune(network, preset="pitome", keep=0.9)
        away = merged.run(read.pixels, [11]).taps[0][:, :1]
        expected = pb.cosine_degradation(probe.backbone.norm(away)[:, 0], full)
    values = [row["value"] for row in rows(out) if row["method"] == "pitome"]
    assert values == pytest.approx(expected.tolist(), rel=1e-3)
    entry = next(entry for entry in document["points"] if entry["method"] == "pitome")
    assert entry["mean"] == pytest.approx(np.mean(values)) and entry["interval"][0] <= entry["mean"]
    assert entry["operations"] < pb.operations(merged, read.pixels) < 1


def test_neighbours_are_those_of_the_embeddings(compared, photos):
    document, _ = compared
    probe = pb.load_probe("tiny-scenes", "cls", device="cpu")
    read = probe.read_images(str(photos), SIZE)
    subject = Subject(probe.backbone, probe.decoder, ())
    (point,) = Grid(subject, FEW, (SIZE, SIZE), {}).points(["evit"])
    bank, queries = subject.full(read.pixels), subject.output(point.model, read.pixels)[0]
    labels = torch.tensor([int("class-1" in str(path)) for path in read.paths])
    entry = next(entry for entry in document["points"] if entry["method"] == "evit")
    for k in (1, 2):
        whole = leave_one_out(bank, labels, bank, k=k)
        assert document["unpruned"]["neighbours"][str(k)]["accuracy"] == whole.double().mean()
        for name, made in {"same": queries, "unpruned": bank}.items():
            hits = leave_one_out(made, labels, queries, k=k)
            found = entry["neighbours"][str(k)][name]
            assert found["accuracy"] == hits.double().mean() and found["p_value"] == mcnemar_p(hits, whole)
            assert found["interval"][0] <= found["accuracy"] <= found["interval"][1]


def test_a_table_of_labels_says_the_same_as_folders(compared, photos, tmp_path):
    document, _ = compared
    table = tmp_path / "labels.csv"
    files = sorted(photos.rglob("*.png"))
    table.write_text("file,class\n" + "".join(f"{file},{file.relative_to(photos).parts[0]}\n" for file in files))
    again = run(photos, tmp_path / "out", methods=("evit",), labels=table, neighbours=(1, 2))
    evit = next(entry for entry in document["points"] if entry["method"] == "evit")
    assert again["points"][0]["neighbours"] == evit["neighbours"]


@pytest.mark.parametrize("after", [4, 11])
def test_an_interrupted_run_goes_on_to_the_same_bytes(compared, photos, tmp_path, monkeypatch, after):
    _, whole = compared
    real, calls = Subject.output, []

    def interrupted(self, model, images):
        calls.append(1)
        if len(calls) == after:
            raise KeyboardInterrupt
        return real(self, model, images)

    monkeypatch.setattr(Subject, "output", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(photos, tmp_path, neighbours=(1, 2))
    kept = rows(tmp_path)
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write('{"method": "be')
    for path in (tmp_path / "embeddings").iterdir():  # what a kill between vectors and rows leaves
        path.write_bytes(path.read_bytes() + b"\x00\x01\x02")
    calls.clear()
    monkeypatch.setattr(Subject, "output", lambda self, *rest: calls.append(1) or real(self, *rest))
    document = run(photos, tmp_path, neighbours=(1, 2))
    assert content(tmp_path) == content(whole)
    assert len(calls) == 3 * 8 - (after - 1) and len(kept) == len(rows(whole)[: len(kept)])
    assert document["points"] == json.loads((whole / "pareto.json").read_text())["points"]


def test_points_and_images_are_added_later(photos, tmp_path, monkeypatch):
    first = run(photos, tmp_path, methods=("resize", "tome"), limit=2)
    before, real, calls = rows(tmp_path), Subject.output, []
    monkeypatch.setattr(Subject, "output", lambda self, *rest: calls.append(1) or real(self, *rest))
    again = run(photos, tmp_path, methods=("resize", "tome"), limit=2)
    assert calls == [] and rows(tmp_path) == before and again["points"] == first["points"]
    more = run(photos, tmp_path, methods=("tome", "evit"))
    assert len(calls) == 1 + 2 + 2  # evit on the first batch, and both on what follows
    assert rows(tmp_path)[: len(before)] == before and more["images"] == 5
    assert {entry["method"] for entry in more["points"]} == {"tome", "evit"}


def test_frozen_and_tuned_are_kept_apart(photos, folders, tmp_path):
    plans = (("mine", folders["half"]), ("mine", folders["half-tuned"]), ("rival", folders["tome-tuned"]))
    knobs = replace(FEW, stages=((3,),), smaller=0)
    document = run(
        photos, tmp_path, methods=("best", "resize"), heads="norm", knobs=knobs, plans=plans, decoder="depth", limit=3,
        budgets=(1.0,),
    )  # fmt: skip
    found = {Key(entry["method"], entry["point"], entry["tuned"]): entry for entry in document["points"]}
    assert {row["method"] + str(row["tuned"]) for row in rows(tmp_path)} == {
        "best, normFalse", "resizeFalse", "mineFalse", "mineTrue", "rivalTrue",
    }  # fmt: skip
    frozen, tuned = found["mine", "half", False], found["mine", "half-tuned", True]
    assert frozen["mean"] == found["best, norm", "block 3, 0.5", False]["mean"] != tuned["mean"]
    assert frozen["plan"] == tuned["plan"] and frozen["scores"] != tuned["scores"]
    assert [(line["method"], line["tuned"]) for line in document["frontiers"]] == [
        ("best, norm", False), ("resize", False), ("mine", False), ("mine", True), ("rival", True),
    ]  # fmt: skip
    frozen_test, tuned_test = document["tests"]
    assert not frozen_test["tuned"] and frozen_test["rival"]["method"] == "resize"
    assert tuned_test["tuned"] and (tuned_test["ours"]["method"], tuned_test["rival"]["method"]) == ("mine", "rival")
    values = {(row["method"], row["tuned"]): [] for row in rows(tmp_path)}
    for row in rows(tmp_path):
        values[row["method"], row["tuned"]].append(row["value"])
    assert tuned_test["p_value"] == wilcoxon_p(values["mine", True], values["rival", True])


def test_a_plan_that_changed_under_its_name_is_refused(photos, folders, tmp_path):
    plans = [("mine", tmp_path / "fast")]
    pruned = pb.PrunedModel.from_pretrained(folders["half"])
    pruned.save_pretrained(tmp_path / "fast")
    run(photos, tmp_path / "out", methods=(), plans=tuple(plans), limit=1)
    before = content(tmp_path / "out")
    tuned = pb.prune(pb.restore(pruned), "norm", ratio=0.4, stages=[3], dense=True)
    tuned.save_pretrained(tmp_path / "fast")
    with pytest.raises(PullbackError, match=r"out: .* holds rows of mine, fast, with another plan"):
        run(photos, tmp_path / "out", methods=(), plans=tuple(plans), limit=2)
    assert content(tmp_path / "out") == before


def test_a_smaller_picture_gives_the_depth_of_the_preset(network):
    backbone = load_backbone(network)
    images = torch.randn(2, 3, SIZE, 70, generator=torch.Generator().manual_seed(0))
    small = pb.prune(network, preset="resize", size=28)
    with torch.no_grad():
        expected = small(images).predicted_depth
    for name, grid in (("depth", None), ("depth-2x2", (2, 2))):
        subject = Subject(backbone, build_decoder(name, backbone), ())
        output, full = subject.output(small, images)[0], subject.full(images)
        assert output.shape == full.shape
        if grid is None:
            torch.testing.assert_close(output, expected)


def test_maps_that_nobody_can_enlarge_are_refused(network):
    backbone = load_backbone(network)
    tokens = pb.Decoder("tokens", (11,), lambda taps, layout: taps[0])
    images = torch.randn(1, 3, SIZE, SIZE)
    subject = Subject(backbone, tokens, ())
    with pytest.raises(DecoderError, match=r"decoder: 'tokens' reads \[5, 192\] of a smaller picture and \[17, 192\]"):
        subject.output(pb.prune(network, preset="resize", size=28), images)


def test_the_grids_follow_the_pictures(network):
    backbone = load_backbone(network)
    subject = Subject(backbone, build_decoder("cls", backbone), ())
    points = Grid(subject, Knobs(), (224, 224), scores_by_block(subject, "importance")).points(
        ["resize", "tome", "best"]
    )
    labels = [point.key.point for point in points]
    assert labels[:6] == [f"{size} px" for size in (210, 196, 182, 168, 154, 140)]
    assert labels[6:17] == [f"r = {r}" for r in (2, 4, 6, 9, 11, 13, 15, 17, 19, 21, 23)]
    assert labels[17:25] == [
        "block 3, 0.3", "block 3, 0.5", "block 3, 0.7", "block 6, 0.3", "block 6, 0.5", "block 6, 0.7",
        "blocks 3, 6, 0.5", "blocks 3, 6, 0.7",
    ]  # fmt: skip
    assert labels[25:27] == ["block 3, 0.3, 210 px", "block 3, 0.5, 210 px"] and labels[-1] == "block 6, 0.5, 196 px"
    assert list(scores_by_block(subject, "norm")) == list(range(1, 11))


def test_a_method_that_a_model_cannot_run_is_left_out_with_a_note(photos, tmp_path):
    document = run(photos, tmp_path, limit=1, decoder="mean")
    assert {entry["method"] for entry in document["points"]} == {"resize", "tome", "tome, decreasing", "pitome", "evit"}
    assert "best is left out: no importance heads for decoder mean of tiny-scenes" in document["notes"][0]
    assert not document["class_row"]


def entry(method: str, point: str, operations: float, mean: float) -> dict:
    return {"method": method, "point": point, "tuned": False, "ours": False, "operations": operations, "mean": mean}


def test_the_best_point_within_a_budget_and_the_frontier():
    entries = [
        entry("a", "1", 0.9, 1.0),
        entry("a", "2", 0.7, 3.0),
        entry("a", "3", 0.6, 2.0),
        entry("a", "4", 0.6, 2.5),
    ]
    entries += [entry("b", "5", 0.8, 0.5)]
    assert best_within(entries, 0.8)["point"] == "5" and best_within(entries[:4], 0.7)["point"] == "3"
    assert best_within(entries, 0.5) is None
    found = frontiers(entries, [0.9, 0.7, 0.5])
    assert found[0]["frontier"] == ["1", "3"] and found[0]["budgets"] == ["1", "3", None] and found[0]["points"] == 4
    assert found[1]["frontier"] == ["5"] and found[1]["budgets"] == ["5", None, None]


def test_times_are_kept_on_the_machine_and_operations_anywhere(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("pullback.pruning.compare._SECONDS", 0.0)
    monkeypatch.setattr("pullback.pruning.compare._FEWEST", 1)
    options = {"methods": ("resize", "evit"), "limit": 1, "time": "1"}
    first = run(photos, tmp_path, **options)
    monkeypatch.setattr(pareto, "operations", lambda *_: pytest.fail("operations were counted again"))
    monkeypatch.setattr(pareto, "timed", lambda *_: pytest.fail("time was measured again"))
    assert run(photos, tmp_path, **options)["points"] == first["points"]
    assert first["points"][0]["milliseconds"]["1"]["speedup"] > 0
    assert "Times are of the backbone with decoder 'cls'" in first["notes"][0]
    monkeypatch.setattr(pareto, "machine", lambda *_, **__: "elsewhere")
    assert run(photos, tmp_path, **options | {"time": "none"})["points"][0]["milliseconds"] == {}


def test_embeddings_that_are_lost_are_noticed(photos, tmp_path):
    options = {"methods": ("evit",), "neighbours": (1,), "limit": 2}
    run(photos, tmp_path, **options)
    for path in (tmp_path / "embeddings").glob("evit*"):
        path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(FileError, match=r"evit-keep-0.5-.*: holds fewer embeddings than there are rows"):
        run(photos, tmp_path, **options)


def test_other_weights_are_refused(photos, folders, tmp_path):
    with pytest.raises(PullbackError, match=r"plan: .*foreign was made of other weights than those of tiny-scenes"):
        run(photos, tmp_path / "out", plans=(("mine", folders["foreign"]),))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("pixie",)}, "methods: expected some of resize, tome, tome-decreasing, .* got 'pixie'"),
        ({"methods": ()}, "methods: no point is left for pictures of 56x56 pixels"),
        ({"knobs": Knobs(sizes=(43,))}, "sizes: expected multiples of the patch size 14 below the 56 pixels .* got 43"),
        ({"knobs": Knobs(sizes=(56,))}, "sizes: expected multiples of the patch size 14 below the 56 pixels .* got 56"),
        ({"knobs": Knobs(r=(0,))}, "r: expected how many tokens each block merges, 1 or more, got 0"),
        ({"knobs": Knobs(keep=(1.5,))}, r"keep: expected a share of the patch tokens above 0 and up to 1, got 1.5"),
        ({"knobs": Knobs(evit_keep=(0.0,))}, "evit_keep: expected a share of the patch tokens above 0"),
        ({"knobs": Knobs(ratios=(1.0,))}, "ratios: expected a share of the patch tokens from 0 up to"),
        ({"knobs": Knobs(stages=((5,),))}, "stages: expected blocks with a score, 3, 6, got 5"),
        ({"knobs": Knobs(stages=((6, 3),))}, "stages: expected ascending blocks"),
        ({"heads": "wisdom"}, "heads: expected importance, a score .* got 'wisdom'"),
        ({"heads": "tome"}, "heads: the single-stage score 'tome' is now called 'bipartite'"),
        ({"heads": ((11, "norm"),)}, "heads: expected blocks from 0 to 10"),
        ({"heads": ((5, "importance"),)}, "heads: no importance head that comes with the package fits"),
        ({"methods": ("best",), "decoder": "mean"}, "heads: no importance head that comes with the package fits"),
        ({"plans": (("mine", Path("nowhere")),)}, "plan: nowhere holds no pruned model that can be read"),
        ({"budgets": (0.0,)}, "budgets: expected shares of the operations, above 0 and up to 1, got 0.0"),
        ({"budgets": (1.5,)}, "budgets: expected shares of the operations, above 0 and up to 1, got 1.5"),
        ({"budgets": ()}, "budgets: expected shares of the operations such as 0.8,0.6, got none"),
        ({"neighbours": (0,)}, "neighbours: expected how many neighbours vote, 1 or more, got 0"),
        ({"neighbours": (1,), "decoder": "depth"}, "neighbours: nearest neighbours are those of embeddings"),
        ({"labels": Path("nowhere.csv")}, "labels: nowhere.csv cannot be read as a CSV"),
        ({"time": "soon"}, "time: expected auto, none or batch sizes"),
        ({"images": "nowhere"}, "path='nowhere': no such file or folder"),
        ({"size": 57}, "size: 57x57 pixels are not divisible by the patch size 14"),
    ],
)
def test_bad_input_is_explained_and_nothing_is_written(photos, tmp_path, changes, message):
    with pytest.raises(PullbackError, match=message):
        run_pareto(replace(request(photos), **changes), tmp_path / "out", Progress())
    assert not (tmp_path / "out").exists()


def test_a_dense_decoder_wants_plans_that_bring_tokens_back(photos, network, tmp_path):
    plain = replace(pb.prune(network, "norm", ratio=0.5, stages=[3]).plan, reinsert="none", fuse_last=False)
    pruned = pb.PrunedModel(network, plain, ["norm"])
    pruned.save_pretrained(tmp_path / "plain")
    plans = (("mine", tmp_path / "plain"),)
    with pytest.raises(
        PullbackError, match=r"plan: decoder 'depth' reads all patch tokens, and .*plain does not bring"
    ):
        run(photos, tmp_path / "out", decoder="depth", methods=(), plans=plans)
    document = run(photos, tmp_path / "out", methods=(), plans=plans, limit=1)
    assert document["points"][0]["plan"]["class_row"], "of the class token the row alone is enough"


def test_the_same_point_twice_is_refused(photos, folders, tmp_path):
    plans = (("mine", folders["half"]), ("mine", folders["half"]))
    with pytest.raises(PullbackError, match="plan: expected each point once, got 'half' of 'mine' several times"):
        run(photos, tmp_path, methods=(), plans=plans)


def test_other_settings_are_refused(compared, photos):
    _, out = compared
    before = content(out)
    with pytest.raises(PullbackError, match=r"out: .* holds a comparison with other settings .*seed: 0 there, 3 asked"):
        run(photos, out, neighbours=(1, 2), seed=3)
    with pytest.raises(PullbackError, match=r"out: .* other settings .*classes: 'folders' there, None asked for"):
        run(photos, out)
    assert content(out) == before
