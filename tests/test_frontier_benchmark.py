"""benchmarks/frontier.py: what is tuned in which order, which points count, who asks in a fold, and what travels."""

import importlib
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

import pullback as pb
from helpers.pictures import write_pictures

RIVALS = ("resize", "tome", "tome-decreasing", "pitome", "evit")


@pytest.fixture
def frontier(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "benchmarks")
    return importlib.import_module("frontier")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=48, num_hidden_layers=4, num_attention_heads=3, image_size=84)
    return Dinov2Model(config).eval().requires_grad_(False)


def test_everybody_is_tuned_at_the_first_budgets_and_ours_alone_at_the_others(frontier):
    ours = {"planned", "planned, own size"}
    found = frontier.to_tune(
        Namespace(budgets=[0.7, 0.5, 0.35, 0.61], seeds=[0, 1], rivals=RIVALS, ours=("planned", "planned, own size"))
    )
    assert {method for method, budget, _ in found if budget == 0.35} == ours | set(RIVALS)
    assert {method for method, budget, _ in found if budget == 0.61} == ours
    assert {budget for _, budget, seed in found if seed == 1} == {0.7}
    assert found[0] == ("planned", 0.7, 0) and len(found) == len(set(found))


@pytest.mark.parametrize("method", RIVALS)
def test_the_mildest_setting_within_a_budget_is_found(frontier, model, method):
    images = torch.zeros(1, 3, 84, 84)
    backbone = pb.load_probe(model, "cls", device="cpu").backbone
    settings = [pb.prune(model, output="cls", **knobs) for knobs in frontier.settings_of(method, backbone, 84)]
    found = frontier.mildest(model, method, images, 0.5)
    place = [one.plan for one in settings].index(found.plan)
    assert pb.operations(found, images) <= 0.5 < pb.operations(settings[place - 1], images)


def test_plans_that_were_found_before_are_made_again_and_scaled_to_other_budgets(frontier, model):
    plan = {"budget": 0.9, "stages": [0, 2], "shares": [0.1, 0.2], "size": None}
    image, scores = torch.zeros(1, 3, 84, 84), {0: "norm", 2: "norm"}
    assert list(frontier.within(model, scores, plan, 0.9, image).plan.shares) == [0.1, 0.2]
    found = frontier.within(model, scores, plan, 0.7, image)
    first, second = found.plan.shares
    assert second == pytest.approx(2 * first) and 0.66 < pb.operations(found, image) <= 0.7


def test_small_changes_keep_the_budget_and_are_never_worse_on_the_images_that_choose(frontier, model, capsys):
    torch.manual_seed(0)
    images = torch.randn(4, 3, 84, 84)
    heads = {block: pb.ImportanceHead(48, 16).requires_grad_(False) for block in range(3)}
    plan = pb.prune(model, [heads[1]], ratio=[0.4], stages=[1], output="cls").plan
    budget = pb.operations(pb.PrunedModel(model, plan, [heads[1]]), images) + 1e-3
    found, expected = frontier.polished(model, heads, plan, images, budget, Namespace(at_once=2, stages=1))
    polisher = frontier.Polisher(model, heads, images, budget, 2)
    assert pb.operations(found, images) <= budget
    assert polisher.mean(found.plan) <= polisher.mean(plan)
    assert expected["polished"] == pytest.approx(polisher.mean(found.plan, expecting=True), rel=1e-5)
    assert expected["searched"] == pytest.approx(polisher.mean(plan, expecting=True), rel=1e-5)


def test_two_processes_share_the_jobs_and_none_is_done_twice(frontier, model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    photos = write_pictures(tmp_path / "photos", 12, broken=False)
    for method in ("resize", "evit"):
        point = frontier.mildest(model, method, torch.zeros(1, 3, 56, 56), 0.6)
        frontier.save_whole(point, tmp_path / "work" / "frozen" / f"{method} 0.6")
    part = ["tune", "--quick", "--model", tmp_path / "model", "--train", photos, "--work", tmp_path / "work"]
    command = [sys.executable, frontier.__file__, *map(str, part)]
    environment = os.environ | {"PYTHONPATH": str(Path(pb.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = "".join(process.communicate(timeout=300)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    for method in ("resize", "evit"):
        assert told.count(f"[frontier] {method} 0.6 seed 0: ") == 1
        assert (tmp_path / "work" / "tuned" / f"{method} 0.6 seed 0" / "vectors.safetensors").is_file()
    assert not list((tmp_path / "work" / "runs").iterdir())


def test_a_claim_ends_with_the_process_that_has_it(frontier, tmp_path):
    script = (
        f"import sys, time; sys.path.insert(0, {str(Path(frontier.__file__).parent)!r}); import frontier\n"
        f"from pathlib import Path\nwith frontier.claimed(Path({str(tmp_path / 'job')!r})) as mine:\n"
        "    print(mine, flush=True); time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(pb.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        with frontier.claimed(tmp_path / "job") as mine:
            assert not mine
        other.kill()
        other.wait()
        with frontier.claimed(tmp_path / "job") as mine:
            assert mine


def test_nothing_begins_that_would_not_end_in_time(frontier):
    clock = frontier.Clock(minutes=1)
    assert clock.run("a quick job", lambda: 5) == 5
    clock._longest = 61.0
    with pytest.raises(frontier.Deadline, match="the next one"):
        clock.run("the next one", lambda: 5)


def test_every_class_has_one_image_in_each_fold(frontier):
    assert frontier.folds_of(["a", "b", "a", "a", "b", "a", "b", "b"]).tolist() == [0, 0, 1, 2, 1, 3, 2, 3]


def test_folds_are_put_together_and_those_that_lack_one_are_left_out(frontier, tmp_path):
    def keep(name, which, right):
        arrays = {k: np.array(right, bool) for k in ("10", "20")}
        np.savez(tmp_path / f"{name}.npz", which=np.array(which, bool), **arrays)

    keep("unpruned", [1, 1, 1, 1], [1, 1, 1, 0])
    keep("planned 0.7 tuned, fold 0", [1, 0, 1, 0], [1, 0])
    keep("planned 0.7 tuned, fold 1", [0, 1, 0, 1], [1, 1])
    keep("tome 0.7 tuned, fold 0", [1, 0, 1, 0], [1, 1])
    report = importlib.import_module("frontier_parts.report")
    rows = {row["name"]: row for row in report.neighbour_rows(tmp_path) if row["k"] == 10}
    assert set(rows) == {"unpruned", "planned 0.7 tuned"}
    assert rows["planned 0.7 tuned"]["accuracy"] == 0.75 and rows["planned 0.7 tuned"]["more"] == 0
    assert rows["planned 0.7 tuned"]["p_value"] == 1  # one lost, one won


def test_what_is_packed_in_parts_comes_out_whole_once_the_last_part_is_there(frontier, tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    content = np.random.default_rng(0).bytes(45_000)  # and the tar's last blocks are zeros
    (tmp_path / "photos" / "a.jpg").write_bytes(content)
    packed = {"from": [str(tmp_path / "photos")], "out": tmp_path / "parts", "part_mb": 0.02}
    frontier.pack(Namespace(**packed))
    there = Namespace(parts=tmp_path / "carried", out=tmp_path / "there")
    for part in sorted((tmp_path / "parts").iterdir()):
        assert not (tmp_path / "there" / "photos" / "a.jpg").is_file()
        (tmp_path / "carried").mkdir(exist_ok=True)
        part.rename(tmp_path / "carried" / part.name)  # and what was carried before is gone
        frontier.unpack(there)
        (tmp_path / "carried" / part.name / "part").unlink()
    assert (tmp_path / "there" / "photos" / "a.jpg").read_bytes() == content
    assert "carry the next one" in capsys.readouterr().out
