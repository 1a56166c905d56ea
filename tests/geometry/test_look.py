"""What `pullback look` computes: block norms of a few layers or decoders, ready to be drawn."""

import numpy as np
import pytest

import pullback as pb
from helpers.progress import Heard
from pullback.errors import PullbackError
from pullback.experiments.demo import write_pictures
from pullback.geometry.look import LookRequest, run_look
from pullback.runs import documents as files
from pullback.runs.files import read_json
from pullback.scenes.render import render

SIZE = 56


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("photos")
    write_pictures(render(range(3), size=SIZE), out)
    return out


def request(folder, **changes) -> LookRequest:
    return LookRequest(**{"model": "tiny-scenes", "images": (str(folder),), "size": SIZE, "device": "cpu", **changes})


def test_the_maps_are_the_block_norms_of_the_jacobian(folder, tmp_path):
    document = run_look(request(folder, decoders=("depth-2x2", "cls"), layers=(10,), limit=2), tmp_path)
    arrays = files.read_look(tmp_path)
    assert read_json(tmp_path / files.LOOK) == document
    assert arrays["pictures"].shape == (2, SIZE, SIZE, 3) and arrays["energy"].shape == (2, 2, 17)
    assert [(each["decoder"], each["layer"]) for each in document["maps"]] == [("depth-2x2", 10), ("cls", 10)]
    assert [each["exact"] for each in document["maps"]] == [True, False], "4 outputs are 4 products, 192 are sampled"
    for place, decoder in enumerate(("depth-2x2", "cls")):
        probe = pb.load_probe("tiny-scenes", decoder, 10, device="cpu")
        features = probe.features(probe.load_images(document["images"], SIZE))
        dense = pb.JacobianOperator(probe, features).dense().double()
        truth = dense.unflatten(-1, (17, -1)).square().sum((1, 3)).numpy()
        error = document["maps"][place]["relative_error"]
        if decoder == "cls":
            assert 0.01 < error < 0.5
            assert np.abs(arrays["energy"][place] / truth - 1).mean() < 3 * error
        else:
            np.testing.assert_allclose(arrays["energy"][place], truth, rtol=1e-3)
            assert error == 0


def test_without_a_choice_it_shows_the_default_decoder_at_three_layers_and_several_decoders_at_two(folder, tmp_path):
    one = run_look(request(folder, limit=1), tmp_path / "one")
    assert [(each["decoder"], each["layer"]) for each in one["maps"]] == [("cls", 4), ("cls", 8), ("cls", 10)]
    two = run_look(request(folder, limit=1, decoders=("cls", "mean")), tmp_path / "two")
    expected = [("cls", 6), ("cls", 10), ("mean", 6), ("mean", 10)]
    assert [(each["decoder"], each["layer"]) for each in two["maps"]] == expected


def test_the_seed_decides_the_probes_and_other_images_do_not(folder, tmp_path):
    some = request(folder, layers=(10,), limit=1)
    first, more, other = (tmp_path / name for name in ("first", "more", "other"))
    run_look(some, first)
    run_look(request(folder, layers=(8, 10), limit=2), more)
    run_look(request(folder, layers=(10,), limit=1, seed=1), other)
    energy = {out: files.read_look(out)["energy"] for out in (first, more, other)}
    np.testing.assert_allclose(energy[first][0, 0], energy[more][1, 0], rtol=1e-4)
    assert np.abs(energy[first] / energy[other] - 1).max() > 1e-3


def test_images_that_cannot_be_read_are_named_and_those_left_out_are_counted(folder, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    heard = Heard()
    document = run_look(request(folder, images=(str(broken), str(folder)), layers=(10,), limit=2), tmp_path, heard)
    assert len(document["images"]) == 2 and document["skipped"][0]["file"] == str(broken)
    assert document["found"] == 4
    assert sum(heard.counts[heard.current]) == heard.totals[heard.current] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": ("nowhere/*.png",)}, "nowhere"),
        ({"images": ()}, "image"),
        ({"decoders": ("clss",)}, "decoder: expected one of cls"),
        ({"num_probes": 1}, "probes: expected at least 2"),
        ({"model": "tiny-views"}, "model: .*several views.*pullback diagnose"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(folder, tmp_path, monkeypatch, changes, message):
    def load(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("pullback.geometry.look.load_any_backbone", load)
    with pytest.raises(PullbackError, match=message):
        run_look(request(folder, **changes), tmp_path / "out")
    assert not (tmp_path / "out" / files.LOOK).exists()


def test_layers_and_sizes_that_the_model_does_not_have_are_refused(folder, tmp_path):
    with pytest.raises(PullbackError, match="layer: expected a block index from 0 to 11"):
        run_look(request(folder, layers=(12,)), tmp_path)
    with pytest.raises(PullbackError, match="not divisible by the patch size"):
        run_look(request(folder, size=60), tmp_path)


def test_the_inputs_of_a_dense_decoder_can_be_looked_at(folder, tmp_path):
    document = run_look(request(folder, decoders=("depth-2x2",), layers=("hooks",), limit=1), tmp_path)
    assert document["maps"][0]["layer"] == "hooks"
    assert np.isfinite(files.read_look(tmp_path)["energy"]).all()
