"""An importance head from stores of targets: what it learns, what it says of itself, what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pullback as pb
from helpers.pictures import SIZE, SMALL, write_pictures
from helpers.progress import Heard
from helpers.toys import tiny_head
from pullback.errors import ImageError, ModelError, PullbackError
from pullback.learning.fit import FitConfig
from pullback.learning.head import ImportanceHead
from pullback.learning.train_head import StoredRows, new_head, train_head
from pullback.probes import ProbeMap
from pullback.runs.provenance import weights_hash
from pullback.targets.compute import compute_targets
from pullback.targets.store import TargetStore

pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")
CONFIG = FitConfig(steps=40, batch=16, warmup=5, validate_every=10, learning_rate=1e-2, ema=0.9)
SHORT = replace(CONFIG, steps=6, validate_every=3)
HEAD = {"width": 32, "heads": 2}


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> ProbeMap:
    """In float32 from a folder, as users have it."""
    from helpers.families import model_of, save

    folder = tmp_path_factory.mktemp("model")
    save(model_of("dinov2"), folder)
    return pb.load_probe(folder, "cls", 1, device="cpu")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "photos", 16)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    """Pictures that are not among the first."""
    folder = write_pictures(tmp_path_factory.mktemp("pictures") / "photos", 24, broken=False)
    for number in range(16):
        (folder / f"{number:02d}.png").unlink()
    return folder


@pytest.fixture(scope="module")
def stores(probe, photos, others, tmp_path_factory) -> dict[str, TargetStore]:
    def compute(name: str, images: Path, **options) -> TargetStore:
        return compute_targets(probe, images, out=tmp_path_factory.mktemp("stores") / name, **(SMALL | options))

    return {
        "train": compute("train", photos, crops=3),
        "square": compute("square", photos, size=28),
        "held out": compute("held-out", others),
    }


def weights(head: ImportanceHead) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in head.state_dict().items()}


def moved(one: ImportanceHead, other: ImportanceHead) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_from_targets_to_a_folder_and_back(probe, stores, photos, tmp_path):
    head = ImportanceHead.fit(stores["train"], probe, held_out=stores["held out"], config=CONFIG, **HEAD)
    head.save_pretrained(tmp_path / "head")
    again = ImportanceHead.from_pretrained(tmp_path / "head")
    features = probe.features(probe.load_images(photos / "00.png", SIZE))
    assert again.config == head.config and not head.training
    assert torch.equal(again(features), head(features)) and again(features).shape == (1, 7)


def test_the_head_learns_and_its_scores_are_in_its_config(probe, stores, tmp_path):
    head = ImportanceHead.fit(
        stores["train"], probe, held_out=stores["held out"], config=CONFIG, out=tmp_path / "run", **HEAD
    )
    scores = head.config.scores
    assert (scores["training_rows"], scores["held_out_rows"]) == (48, 8)
    assert scores["rho"] > max(0.5, scores["rho_of_the_mean_map"])
    assert set(scores) >= {"rho_se", "rho_patches", "best_step"} and "score" not in scores
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = next(line for line in lines if line["step"] == scores["best_step"])
    assert best["rho"] == scores["rho"] == max(line["rho"] for line in lines)


def test_the_scores_are_those_of_the_head_on_the_held_out_store(probe, stores):
    from pullback.learning.train_head import head_scores

    head = ImportanceHead.fit(stores["train"], probe, held_out=stores["held out"], config=SHORT, **HEAD)
    examples = StoredRows.of(probe, stores["held out"]).examples()
    assert head_scores(head, examples)["rho"] == pytest.approx(head.config.scores["rho"], abs=1e-6)


def test_the_head_knows_what_it_was_made_for(probe, stores):
    head = ImportanceHead.fit(stores["train"], probe, held_out=0.3, config=SHORT, **HEAD)
    origin = head.config.origin
    assert (origin.family, origin.layer, origin.decoder, origin.rank) == ("dinov2", 1, "cls", 3)
    assert origin.weights == weights_hash(probe.backbone.model) and origin.resolutions == (SIZE,)
    assert (head.config.dim, head.config.width, head.config.heads, head.layer) == (24, 32, 2, 1)


def test_a_share_holds_images_out_with_all_their_crops(probe, stores):
    head = ImportanceHead.fit(stores["train"], probe, held_out=0.3, config=SHORT, **HEAD)
    train, held_out = (head.config.scores[name] for name in ("training_rows", "held_out_rows"))
    assert train + held_out == 48 and held_out % 3 == 0 and 0 < held_out < 30


def test_two_resolutions_train_one_head(probe, stores, photos):
    both = [stores["train"], stores["square"]]
    head = ImportanceHead.fit(both, probe, held_out=stores["held out"], config=CONFIG, **HEAD)
    assert head.config.origin.resolutions == (SIZE, (28, 28))
    assert head.config.scores["training_rows"] == 48 + 16 and head.config.scores["rho"] > 0.5
    assert "rho_of_the_mean_map" in head.config.scores
    square = ImportanceHead.fit(stores["square"], probe, held_out=stores["held out"], config=SHORT, **HEAD)
    assert "rho_of_the_mean_map" not in square.config.scores  # no maps of the held-out grid


def test_kept_and_recomputed_features_give_the_same_head_up_to_rounding(probe, stores):
    options = {"held_out": stores["held out"], "config": SHORT, **HEAD}
    kept, recomputed, again = (
        ImportanceHead.fit(stores["train"], probe, keep_features=keep, **options) for keep in (True, False, True)
    )
    assert moved(kept, again) == 0 < moved(kept, recomputed)
    features = StoredRows.of(probe, stores["held out"]).features(torch.arange(8))
    still = new_head(StoredRows.of(probe, stores["train"]).examples(), 32, 2)
    found, other, before = (head(features).detach() for head in (kept, recomputed, still))
    torch.testing.assert_close(other, found, rtol=1e-2, atol=0)
    assert (before / found - 1).abs().max() > 0.1


def test_another_seed_gives_another_head(probe, stores):
    options = {"held_out": stores["held out"], **HEAD}
    heads = [ImportanceHead.fit(stores["train"], probe, config=replace(SHORT, seed=s), **options) for s in (0, 1)]
    assert moved(*heads) > 1e-2


def test_block_norms_are_another_target(probe, stores):
    options = {"held_out": stores["held out"], "config": SHORT, **HEAD}
    heads = [ImportanceHead.fit(stores["train"], probe, target=t, **options) for t in ("importance", "block-norm")]
    assert [head.config.target for head in heads] == ["importance", "block-norm"]
    features = StoredRows.of(probe, stores["train"]).features(torch.arange(8))
    level = [head(features).log().mean().item() for head in heads]
    table = stores["train"].read()
    truth = [target.log().mean().item() for target in (table.importance, table.block_norm)]
    assert level[1] - level[0] == pytest.approx(truth[1] - truth[0], abs=0.4) and truth[1] > truth[0] + 0.3


def test_a_head_may_start_from_another_which_stays_as_it_is(probe, stores):
    options = {"held_out": stores["held out"], **HEAD}
    first = ImportanceHead.fit(stores["train"], probe, target="block-norm", config=CONFIG, **options)
    before, described = weights(first), first.config
    still = replace(SHORT, learning_rate=0.0)
    second = ImportanceHead.fit(stores["train"], probe, start=first, config=still, **options)
    assert moved(first, second) == 0 and second.config.target == "importance"
    third = ImportanceHead.fit(stores["train"], probe, start=first, config=SHORT, **options)
    assert moved(first, third) > 1e-3
    assert all(torch.equal(before[name], value) for name, value in first.state_dict().items())
    assert first.config is described


def test_progress_is_told_and_a_run_that_goes_on_counts_what_was_done(probe, stores, tmp_path):
    class Stopped(Exception):
        pass

    class Stopping(Heard):
        def advance(self, count: int) -> None:
            super().advance(count)
            if (tmp_path / "checkpoint.pt").exists():
                raise Stopped

    options = {"held_out": stores["held out"], "config": SHORT, **HEAD}
    with pytest.raises(Stopped):
        ImportanceHead.fit(stores["train"], probe, out=tmp_path, progress=Stopping(), **options)
    heard = Heard()
    head = ImportanceHead.fit(stores["train"], probe, out=str(tmp_path), progress=heard, **options)
    assert heard.totals == {"computing features": 48 + 8, "training": 6}
    assert sum(heard.counts["computing features"]) == 48 + 8 and heard.counts["training"] == [3, 1, 1, 1]
    assert moved(head, ImportanceHead.fit(stores["train"], probe, **options)) == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rank_weight": 1.0}, "rank_weight: 0.5 there, 1.0 asked for"),
        ({"target": "block-norm"}, "target: 'importance' there, .*; network.target: 'importance' there, .*"),
        ({"held_out": 0.2}, "held_out: .* asked for"),
        ({"start": True}, "start: None there, .* asked for"),
        ({"config": replace(SHORT, seed=1)}, "seed: 0 there, 1 asked for"),
        ({"train": "square"}, "train: .* asked for"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(probe, stores, tmp_path, changes, named):
    def run(train: str = "train", start: bool = False, **options) -> ImportanceHead:
        known = {"held_out": stores["held out"], "config": SHORT, "out": tmp_path, "width": 16, "heads": 2}
        head = tiny_head(dim=24) if start else None
        return train_head(probe, [stores[train]], start=head, **(known | options))

    run()
    with pytest.raises(
        PullbackError, match=rf"out: .*checkpoint.pt holds a training run with other settings \({named}\)"
    ):
        run(**changes)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held_out": 1.5}, "held_out: expected a share between 0 and 1"),
        ({"held_out": 1e-6}, r"held_out: \d+ rows cannot be split by a share"),
        ({"target": "beauty"}, "target: expected one of importance, block-norm, got 'beauty'"),
        ({"config": replace(SHORT, seed=5)}, "seed: 0 there, 5 asked for"),
        ({"width": 64}, "network.width: 32 there, 64 asked for"),
        ({"rank_weight": 2.0}, "rank_weight: 0.5 there, 2.0 asked for"),
        ({"width": 30}, "width, heads: expected width / 4"),
        ({"out": "taken"}, "out: cannot make the folder"),
    ],
    ids=str,
)
def test_what_can_be_refused_is_refused_before_features_are_computed(
    probe, stores, tmp_path, changes, message, monkeypatch
):
    options = {"held_out": 0.3, "config": SHORT, "out": tmp_path / "run", **HEAD}
    train_head(probe, [stores["train"]], **options)
    (tmp_path / "taken").write_text("")
    changes = {name: tmp_path / value if name == "out" else value for name, value in changes.items()}
    monkeypatch.setattr("pullback.learning.train_head.kept", lambda *_, **__: pytest.fail("features were computed"))
    with pytest.raises(PullbackError, match=message):
        train_head(probe, [stores["train"]], **(options | changes))


def test_no_store_is_an_error(probe):
    with pytest.raises(PullbackError, match="train: expected at least one store of targets, got none"):
        train_head(probe, [])


def test_a_store_of_another_layer_is_refused(probe, stores):
    with pytest.raises(ModelError, match=r"probe: .*train holds targets of another one \(layer: 1 there, 0 here\)"):
        ImportanceHead.fit(stores["train"], replace(probe, at=0))


def test_a_store_of_other_weights_or_another_decoder_is_refused(probe, stores):
    from helpers.families import SMALL_MODELS, randomized

    other = pb.load_probe(randomized(SMALL_MODELS["dinov2"].make(), seed=1).float(), "mean", 1)
    message = r"\(weights: '\w+' there, '\w+' here; decoder: 'cls' there, 'mean' here\). Load the one it was made for"
    with pytest.raises(ModelError, match=message):
        ImportanceHead.fit(stores["train"], other)
    with pytest.raises(ModelError, match=r"held-out holds targets of another one"):
        compatible = replace(stores["held out"], config=stores["held out"].config | {"decoder": "mean"})
        ImportanceHead.fit(stores["train"], probe, held_out=compatible)


def test_a_multi_layer_store_from_before_the_norm_is_refused_after_it(stores, photos, tmp_path):
    from helpers.families import model_of

    before, after = (pb.multi_layer_probe(model_of("depth-v2"), "depth-2x2", after_norm=norm) for norm in (False, True))
    store = compute_targets(before, photos, out=tmp_path / "store", rank=2, size=28)
    with pytest.raises(ModelError, match=r"\(after_norm: False there, True here\)"):
        ImportanceHead.fit(store, after)
    head = ImportanceHead.fit(store, before, held_out=0.3, config=SHORT, **HEAD)
    assert head.config.dim == 4 * 24 and head.layer is None


def test_a_head_for_other_features_cannot_be_the_start(probe, stores):
    with pytest.raises(ModelError, match="start: expected a head for features of width 24, got 8"):
        ImportanceHead.fit(stores["train"], probe, start=tiny_head(dim=8))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 30}, "width, heads: expected width / 4 to be a multiple of heads, got"),
        ({"width": 32, "heads": 3}, "width, heads: expected width / 4 to be a multiple of heads, got"),
        ({"heads": 0}, "heads: expected a whole number of at least 1, got 0"),
        ({"width": 0}, "width: expected a whole number of at least 1, got 0"),
        ({"width": -4}, "width: expected a whole number of at least 1, got -4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(probe, stores, sizes, message):
    with pytest.raises(ModelError, match=message):
        ImportanceHead.fit(stores["train"], probe, held_out=0.3, **sizes)


def test_an_image_that_is_gone_is_named(probe, stores, photos, tmp_path):
    copy = shutil.copytree(photos, tmp_path / "photos")
    (copy / "05.png").unlink()
    with pytest.raises(ImageError, match=r"source: 3 of 48 images of these targets are not in it, such as '05.png'"):
        ImportanceHead.fit(stores["train"], probe, images=copy)
