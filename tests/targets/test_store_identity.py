"""A store is added to by the probe that began it, not by another one of the same name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import pullback as pb
from helpers.families import model_of, save
from helpers.pictures import SMALL, write_pictures
from pullback.errors import DecoderError, ModelError, PullbackError
from pullback.learning.fit import FitConfig
from pullback.learning.head import ImportanceHead
from pullback.targets.compute import compute_targets

pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")


@pytest.fixture
def photos(tmp_path) -> Path:
    return write_pictures(tmp_path / "photos", 3, broken=False)


def head(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Conv2d(24, 2, 1).double().eval()


def probe_with(decoder, **options):
    return pb.load_probe(model_of("dinov2"), decoder, 1, **options)


def store_of(probe, photos, out, **options):
    return compute_targets(probe, photos, out=out, **(SMALL | {"rank": 2} | options))


def test_a_retrained_head_does_not_reuse_the_rows_of_the_old_one(photos, tmp_path):
    store_of(probe_with(pb.PatchGrid(head(0))), photos, tmp_path / "store", limit=2)
    message = r"holds targets with other settings \(decoder_identity: 'layers 2, code (\w+), parameters \w+' there, "
    with pytest.raises(PullbackError, match=message + r"'layers 2, code \1, parameters \w+' asked for"):
        store_of(probe_with(pb.PatchGrid(head(1))), photos, tmp_path / "store")
    assert len(store_of(probe_with(pb.PatchGrid(head(0))), photos, tmp_path / "store")) == 3


def test_two_lambdas_do_not_mix_in_one_store(photos, tmp_path):
    store_of(probe_with(lambda tokens: tokens[:, 0, :3]), photos, tmp_path / "store", limit=2)
    with pytest.raises(PullbackError, match=r"decoder_identity: .* there, .* asked for"):
        store_of(probe_with(lambda tokens: tokens[:, 1, :3]), photos, tmp_path / "store")
    assert len(store_of(probe_with(lambda tokens: tokens[:, 0, :3]), photos, tmp_path / "store")) == 3


@pytest.mark.parametrize("argument", ["distance", "output_metric"])
def test_neither_do_two_distances_or_metrics_of_one_name(photos, tmp_path, argument):
    def made(factor: int):
        def measure(output):
            return factor * (torch.eye(24, dtype=output.dtype) if argument == "output_metric" else output)

        return probe_with("cls", **{argument: measure})

    assert made(1).identity != made(2).identity
    store_of(made(1), photos, tmp_path / "store", limit=2)
    with pytest.raises(PullbackError, match=rf"\({argument}_identity: .* there, .* asked for\)"):
        store_of(made(2), photos, tmp_path / "store")


def test_a_given_version_decides_in_place_of_the_code(photos, tmp_path):
    def made(version: str, factor: int) -> pb.Decoder:
        return pb.Decoder("own", (2,), lambda taps, layout: factor * taps[0][:, 0], version=version)

    store_of(probe_with(made("1", 1)), photos, tmp_path / "store", limit=2)
    assert len(store_of(probe_with(made("1", 1 + 0)), photos, tmp_path / "store")) == 3
    with pytest.raises(PullbackError, match=r"'layers 2, version 1' there, 'layers 2, version 2' asked for"):
        store_of(probe_with(made("2", 1)), photos, tmp_path / "store")


def test_a_decoder_that_cannot_be_told_from_others_is_refused_before_anything_is_written(photos, tmp_path):
    import threading

    lock = threading.Lock()

    def locked(tokens):
        with lock:
            return tokens[:, 0]

    with pytest.raises(DecoderError, match=r"'locked' .*uses lock, a lock.*version='1'"):
        store_of(probe_with(locked), photos, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def forget_identities(folder: Path) -> Path:
    """Make it a store of a version that did not record them."""
    path = folder / "targets.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if not name.endswith("_identity")}
    path.write_text(json.dumps(config))
    return folder


def test_a_store_of_an_older_version_is_read_but_not_added_to(photos, tmp_path):
    probe = probe_with("cls")
    store_of(probe, photos, tmp_path / "store", limit=2)
    forget_identities(tmp_path / "store")
    assert len(pb.TargetStore.open(tmp_path / "store").read()) == 2
    with pytest.raises(PullbackError, match=r"older version of pullback, which did not record decoder_identity.*read"):
        store_of(probe, photos, tmp_path / "store")
    with pytest.raises(PullbackError, match=r"other settings \(rank: 2 there, 3 asked for\)"):
        store_of(probe, photos, tmp_path / "store", rank=3)


FIT = {"config": FitConfig(steps=2, batch=2, warmup=1, validate_every=1), "width": 16, "heads": 2, "held_out": 0.5}


def test_a_head_learns_from_the_store_of_its_own_decoder_alone(photos, tmp_path):
    photos = write_pictures(photos, 8, broken=False)
    store = store_of(probe_with(pb.PatchGrid(head(0))), photos, tmp_path / "store")
    with pytest.raises(ModelError, match=r"holds targets of another one \(decoder_identity: '.*' there, '.*' here\)"):
        ImportanceHead.fit(store, probe_with(pb.PatchGrid(head(1))), **FIT)
    made = ImportanceHead.fit(store, probe_with(pb.PatchGrid(head(0))), **FIT)
    assert made.config.origin.decoder_identity == store.config["decoder_identity"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"distance": "cosine"}, "distance: None there, 'cosine' here"),
        ({"output_metric": torch.eye(24)}, r"output_metric: None there, '\w+' here"),
        ({"read_probe_layer": False}, "read_probe_layer: True there, False here"),
    ],
)
def test_a_head_does_not_learn_from_targets_of_another_probe_map(photos, tmp_path, changes, named):
    store = store_of(probe_with("cls"), photos, tmp_path / "store")
    with pytest.raises(ModelError, match=rf"holds targets of another one \(.*{named}"):
        ImportanceHead.fit(store, probe_with("cls", **changes), **FIT)


def test_a_head_of_an_old_store_does_not_claim_a_decoder_that_nobody_checked(photos, tmp_path):
    photos = write_pictures(photos, 8, broken=False)
    probe = probe_with("cls")
    store_of(probe, photos, tmp_path / "store")
    made = ImportanceHead.fit(pb.TargetStore.open(forget_identities(tmp_path / "store")), probe, **FIT)
    assert made.config.origin.decoder == "cls" and made.config.origin.decoder_identity is None


def test_a_store_gives_its_probe_back_with_every_choice(photos, tmp_path):
    save(model_of("depth-v2"), tmp_path / "model")
    probe = pb.load_probe(tmp_path / "model", "depth-2x2", 1, device="cpu", read_probe_layer=False, distance="cosine")
    store = store_of(probe, photos, tmp_path / "store", size=28)
    again = store.load_probe(device="cpu")
    assert not again.read_probe_layer and again.identity == probe.identity and again.distance is probe.distance
    weighted = replace(probe, output_metric=torch.eye(4))
    other = store_of(weighted, photos, tmp_path / "weighted", size=28)
    with pytest.raises(
        PullbackError, match=r"weighted has .*used an output metric, which is not stored.*output_metric="
    ):
        other.load_probe(device="cpu")


def test_a_store_of_a_function_does_not_give_back_a_decoder_of_the_same_name(photos, tmp_path):
    def mean(tokens):
        return tokens[:, 0]

    save(model_of("dinov2"), tmp_path / "model")
    store = store_of(pb.load_probe(tmp_path / "model", mean, 1, device="cpu"), photos, tmp_path / "store")
    with pytest.raises(PullbackError, match=r"store has .*decoder 'mean' of it is not the one of that name.*decoder="):
        store.load_probe(device="cpu")
