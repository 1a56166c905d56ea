"""`train_heads`: a head for every layer from pictures alone, which goes on exactly where it was killed."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

import pullback as pb
from pullback.errors import ImageError, PullbackError
from pullback.learning.head import ImportanceHead
from pullback.learning.train_heads import HeadSize, StreamConfig, heads_config, heads_layers, stream_config, train_heads
from pullback.runs.files import read_arrays
from pullback.targets.recipe import targets_of

STREAM = StreamConfig(block=4, steps_per_block=2, at_once=2, hints=8)


@pytest.fixture(scope="module")
def probe():
    return pb.load_probe("tiny-scenes", "cls", device="cpu")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two folders with 6 and 3 pictures; the last of the second is a copy of the first of the first."""
    root, generator = tmp_path_factory.mktemp("pictures"), torch.Generator().manual_seed(0)
    for name, count in (("one", 6), ("two", 2)):
        (root / name).mkdir()
        for number in range(count):
            pixels = torch.randint(0, 256, (70, 64, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(root / name / f"{number}.png")
    (root / "two" / "2.png").write_bytes((root / "one" / "0.png").read_bytes())
    return root


def run(probe, pictures, **options):
    config = heads_config(probe.device, steps=4, batch=2, validate_every=2, warmup=1)
    known = {"layers": (8, 10), "width": 16, "judges": 2, "size": 56, "stream": STREAM, "config": config}
    return train_heads(probe, [str(pictures / "one")], pictures / "two", **known | options)


def hashes(heads):
    return {
        layer: hashlib.sha256(b"".join(value.numpy().tobytes() for value in head.state_dict().values())).hexdigest()
        for layer, head in heads.items()
    }


def test_there_is_a_head_for_every_layer_that_knows_what_it_was_made_for(probe, pictures, tmp_path):
    heads = run(probe, pictures, out=tmp_path)
    assert list(heads) == [8, 10]
    table = json.loads((tmp_path / "heads.json").read_text())
    for layer, head in heads.items():
        stored = ImportanceHead.from_pretrained(tmp_path / f"L{layer:02d}")
        assert stored.layer == layer == head.layer and stored.config.target == "block-norm"
        origin = stored.config.origin
        assert (origin.family, origin.decoder, origin.resolutions) == ("tiny-scenes", "cls", ((56, 56),))
        assert origin.blocks and origin.weights
        scores = stored.config.scores
        assert -1 <= scores["rho"] <= 1 and scores["rho_se"] >= 0 and 0 < scores["operations_share"] < 0.1
        assert scores["steps"] == 4 and scores["held_out_images"] == 2
        assert table["heads"][f"L{layer:02d}"]["rho"] == scores["rho"]
    pruned = pb.prune(probe.backbone.model, heads[8], ratio=0.3, stages=[8])
    assert pruned.scores[0].head is heads[8]


def test_a_run_that_is_killed_goes_on_exactly(probe, pictures, tmp_path):
    straight = hashes(run(probe, pictures, out=tmp_path / "straight"))
    for steps in (1, 3):  # within a block, and between a validation and the next
        folder = tmp_path / f"killed-{steps}"

        def kill(step, numbers, steps=steps):
            if step == steps:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(probe, pictures, out=folder, on_step=kill)
        assert hashes(run(probe, pictures, out=folder)) == straight


def test_the_importance_of_held_out_pictures_is_exact_and_kept(probe, pictures, tmp_path):
    run(probe, pictures, out=tmp_path)
    settings = json.loads((tmp_path / "held_out" / "settings.json").read_text())
    assert settings["method"] == "exact" and settings["images"] == 2
    kept = read_arrays(tmp_path / "held_out" / "L08.npz")["importance"]
    order = torch.randperm(3, generator=torch.Generator().manual_seed(0)).tolist()[:2]
    images = torch.cat([probe.load_images(pictures / "two" / f"{number}.png", 56) for number in order])
    own = replace(probe, at=8)
    expected = targets_of(own, own.features(images), 20, "exact").importance.float()
    torch.testing.assert_close(torch.from_numpy(kept), expected, rtol=1e-3, atol=1e-6)


def test_other_settings_do_not_go_on(probe, pictures, tmp_path):
    run(probe, pictures, out=tmp_path)
    with pytest.raises(PullbackError, match=r"out: .*network.heads"):
        run(probe, pictures, out=tmp_path, width=32)
    with pytest.raises(PullbackError, match=r"out: .*steps_per_block"):
        run(probe, pictures, out=tmp_path, stream=replace(STREAM, steps_per_block=4))


def test_no_picture_is_on_both_sides(probe, pictures, tmp_path):
    heads = run(probe, pictures)
    assert heads[8].config.scores["training_images"] == 5  # of six: one is also held out
    everything = [str(pictures / "one"), str(pictures / "two")]
    config = heads_config(probe.device, steps=1, batch=2)
    options = {"layers": (10,), "width": 16, "size": 56, "stream": STREAM, "config": config}
    shared = train_heads(probe, everything, 0.25, **options)[10].config.scores
    assert (shared["training_images"], shared["held_out_images"]) == (6, 2)  # of eight different ones
    with pytest.raises(ImageError, match="held_out: all training images are among the held-out ones"):
        train_heads(probe, pictures / "one", pictures / "one", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ()}, "layers: expected at least one"),
        ({"layers": (3, 3)}, "layers: expected at least one, each once"),
        ({"layers": (40,)}, "layer: expected a block index"),
        ({"size": (56, 70)}, "size: expected a square"),
        ({"judges": 0}, "judges: expected a whole number"),
        ({"width": 30}, "width, heads: expected"),
    ],
)
def test_bad_input_is_refused_before_anything_is_read(probe, options, message):
    with pytest.raises(PullbackError, match=message):
        train_heads(probe, "no/such/folder", 0.1, **options)


def test_a_share_must_leave_pictures_on_both_sides(probe, pictures):
    for share in (0.01, 1.5):
        with pytest.raises(PullbackError, match="held_out: "):
            train_heads(probe, pictures / "one", share, layers=(10,), size=56)


def test_defaults_are_layers_1_to_the_last_but_one_and_small_on_a_cpu(probe):
    assert heads_layers(probe) == tuple(range(1, 11))
    assert stream_config(probe, (1,)).block == 256 and stream_config(probe, (1,), block=8).block == 8
    assert heads_config(torch.device("cpu")).steps < heads_config(torch.device("cuda")).steps == 960
    assert HeadSize("L03", 3) == ("L03", 3, 256, 1)


def test_an_output_of_few_numbers_has_importance_of_its_own_rank(pictures):
    few = pb.load_probe("tiny-scenes", lambda tokens: tokens[:, 0, :4], device="cpu")
    assert run(few, pictures, layers=(10,))[10].config.origin.rank == 4
