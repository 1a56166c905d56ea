"""Tuning changes vectors alone, in a copy: outputs come nearer, the original stays, runs go on exactly."""

import copy
import json
import logging

import pytest
import torch
from torch import nn

import pullback as pb
from helpers.families import SMALL_MODELS, images_for, model_of
from helpers.pictures import write_pictures
from pullback.data.crops import Variation
from pullback.errors import ImageError, ModelError, PullbackError
from pullback.learning.head import ImportanceHead
from pullback.pruning.plan import PrunePlan
from pullback.pruning.tuning_images import TuningImages
from pullback.registry import BACKBONES
from pullback.runs.provenance import weights_hash

FAMILIES = [name for name, small in SMALL_MODELS.items() if BACKBONES[small.family].assemble]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("photos"), 12, broken=False)


@pytest.fixture(scope="module")
def same_photos(tmp_path_factory):
    """The same, and one more."""
    return write_pictures(tmp_path_factory.mktemp("same"), 13, broken=False)


def last_first(tokens, context):
    """A score that does not change with the features, so that the loss has no jumps."""
    return -context.positions.to(tokens)


def small(name="dinov2", score=last_first, **options):
    return pb.prune(model_of(name), score, **{"ratio": 0.5, "stages": [0], "preset": "drop", **options})


def side(name):
    return 3 * SMALL_MODELS[name].patch_size


def tuned(pruned, photos, name="dinov2", **options):
    usual = {"steps": 4, "batch": 4, "held_out": 0.25, "validate_every": 2, "size": side(name), "learning_rate": 1e-3}
    return pb.tune(pruned, photos, **{**usual, **options})


def values(output):
    if isinstance(output, torch.Tensor):
        return [output]
    fields = output._asdict() if isinstance(output, tuple) else vars(output)
    return [value for value in fields.values() if isinstance(value, torch.Tensor)]


def call(model, backbone, images):
    from pullback.backbones.outputs import own_output

    return values(own_output(model, backbone, images))


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_come_nearer_and_the_original_is_as_it_was(name, photos, same_photos):
    model = model_of(name)
    before = weights_hash(model)
    fast = small(name)
    whole = Variation(area=(0.99, 1.0))  # what it learns is what it is asked
    better = tuned(fast, photos, name, held_out=same_photos, batch=12, steps=12, variation=whole)
    record = better.tuning
    assert record["after"] < 0.98 * record["before"] and record["best_step"] > 0
    assert record["held_out_images_trained_on"] == 12
    assert weights_hash(model) == before and pb.restore(better) is model
    assert all(value.grad is None for value in model.parameters())
    images = images_for(name, (3, 3))
    ours, theirs = (call(one, fast.backbone, images) for one in (better, fast))
    assert any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    untouched = call(small(name), fast.backbone, images)
    assert all(torch.equal(a, b) for a, b in zip(theirs, untouched, strict=True))


def test_vectors_alone_differ_and_matrices_are_shared(photos):
    model = model_of("dinov2")
    better = tuned(small(), photos, steps=12, batch=8)
    copied, own = dict(better.backbone.model.named_parameters()), dict(model.named_parameters())
    assert copied.keys() == own.keys()
    for name, value in own.items():
        if name in better.vectors:
            assert value.ndim == 1 and copied[name] is better.vectors[name]
        else:
            assert copied[name] is value and copied[name].data_ptr() == value.data_ptr()
    assert any(not torch.equal(better.vectors[name], own[name]) for name in better.vectors)
    assert "tuned" in repr(better) and "tuned" not in repr(small())
    per_block = 2 * 2 * 24 + 4 * 24 + 2 * 24 + 48 + 24  # two norms, four biases of attention, two scales, the MLP
    assert sum(value.numel() for value in better.vectors.values()) == 3 * per_block + 2 * 24


def test_a_bias_of_which_blocks_hold_parts_is_tuned_once(photos):
    better = tuned(small("timm-token"), photos, "timm-token")
    assert [name for name in better.vectors if "qkv" in name] == [f"blocks.{block}.attn.qkv.bias" for block in range(3)]


@pytest.mark.parametrize("name", ["dinov2", "clip", "siglip", "timm-token", "tiny-scenes", "siglip2"])
def test_position_embeddings_where_asked_for(name, photos):
    better = tuned(small(name), photos, name, positions=True)
    (found,) = [value for value in better.vectors.values() if value.ndim > 1]
    assert any(found is value for key, value in better.backbone.model.named_parameters() if "pos" in key)


def test_gradients_that_the_model_asks_for_do_not_reach_it(photos):
    model = copy.deepcopy(model_of("dinov2")).requires_grad_(True)
    tuned(pb.prune(model, "norm", ratio=0.5, stages=[0]), photos)
    assert all(value.grad is None and value.requires_grad for value in model.parameters())


@pytest.mark.parametrize("name", ["dinov2", "depth-v2", "tiny-scenes", "clip"])
def test_saved_and_loaded_it_gives_the_same(name, photos, tmp_path):
    better = tuned(small(name, "norm"), photos, name, steps=12, batch=8)
    images = images_for(name, (3, 3))
    folder = better.save_pretrained(tmp_path / "saved")
    given = pb.PrunedModel.from_pretrained(folder, model=model_of(name))
    for ours, theirs in zip(call(given, given.backbone, images), call(better, better.backbone, images), strict=True):
        assert torch.equal(ours, theirs)
    alone = pb.PrunedModel.from_pretrained(folder)
    assert alone.tuning == better.tuning and alone.vectors.keys() == better.vectors.keys()
    for key, value in better.vectors.items():
        assert torch.equal(alone.vectors[key].double(), value.to(alone.vectors[key].dtype).double())
    numbers = sum(value.numel() for value in better.vectors.values())
    assert (folder / "vectors.safetensors").stat().st_size < 8 * numbers + 60_000


def test_saved_over_a_tuned_model_an_untuned_one_is_untuned(photos, tmp_path):
    tuned(small(score="norm"), photos).save_pretrained(tmp_path)
    assert (tmp_path / "vectors.safetensors").is_file()
    small(score="norm").save_pretrained(tmp_path)
    assert not (tmp_path / "vectors.safetensors").exists()
    assert pb.PrunedModel.from_pretrained(tmp_path).vectors is None


def test_a_folder_of_an_older_version_is_read(tmp_path):
    small(score="norm").save_pretrained(tmp_path)
    document = json.loads((tmp_path / "pruned.json").read_text())
    del document["tuned"]
    (tmp_path / "pruned.json").write_text(json.dumps(document))
    assert pb.PrunedModel.from_pretrained(tmp_path).vectors is None


def test_vectors_of_other_weights_are_refused(photos, tmp_path):
    folder = tuned(small(score="norm"), photos).save_pretrained(tmp_path)
    other = copy.deepcopy(model_of("dinov2"))
    other.encoder.layer[0].norm1.weight.add_(0.1)
    with pytest.raises(ModelError, match=r"vectors: those in .*were tuned for other weights than those of Dinov2Model"):
        pb.PrunedModel.from_pretrained(folder, model=other)
    (folder / "vectors.safetensors").write_bytes(b"half")
    with pytest.raises(ModelError, match=r"folder: .*vectors.safetensors cannot be read"):
        pb.PrunedModel.from_pretrained(folder)
    (folder / "vectors.safetensors").unlink()
    with pytest.raises(ModelError, match=r"folder: .* has no vectors.safetensors, which a tuned model needs"):
        pb.PrunedModel.from_pretrained(folder)


def test_a_copy_a_cast_and_a_state_dict_have_the_vectors(photos):
    better, images = tuned(small(), photos, steps=12, batch=8), images_for("dinov2", (3, 3))
    expected = better(images).pooler_output
    again = copy.deepcopy(better)
    assert torch.equal(again(images).pooler_output, expected)
    single = copy.deepcopy(better).float()
    assert {value.dtype for value in single.vectors.values()} == {torch.float32}
    assert all(single.vectors[key] is value for key, value in single.backbone.model.named_parameters() if
               key in single.vectors)  # fmt: skip
    torch.testing.assert_close(single(images.float()).pooler_output, expected.float(), rtol=1e-3, atol=1e-3)
    state = {key: value.clone() for key, value in better.state_dict().items()}
    assert sum(key.startswith("tuned.") for key in state) == len(better.vectors)
    state["tuned.layernorm/bias"] += 1
    for assign in (False, True):
        again.load_state_dict(state, assign=assign)
        assert not torch.equal(again(images).pooler_output, expected)
        again = copy.deepcopy(better)


def test_a_plan_that_removes_nothing_calls_the_model_with_the_tuned_vectors(photos):
    better = tuned(small(), photos, steps=12, batch=8)
    whole = small(ratio=0.0).with_vectors(better.tuned)
    images = images_for("dinov2", (3, 3))
    assert not torch.equal(whole(images).pooler_output, model_of("dinov2")(images).pooler_output)
    torch.testing.assert_close(whole(images).pooler_output, whole.pruned(images).pooler_output)


def test_a_plan_that_removes_nothing_has_nothing_to_learn(photos, caplog):
    with caplog.at_level(logging.WARNING):
        same = tuned(small("tiny-scenes", ratio=0.0), photos, "tiny-scenes")
    assert "no step of 4 was better on held-out images" in caplog.text and same.tuning["best_step"] == 0
    own = dict(model_of("tiny-scenes").named_parameters())
    assert all(torch.equal(value, own[key]) for key, value in same.vectors.items())


@pytest.mark.parametrize(
    ("name", "options", "measure"),
    [
        ("tiny-scenes", {}, "silog"),
        ("tiny-scenes", {"match_hooks": 0.5}, "silog"),
        ("dinov2", {}, "cosine"),
        ("clip", {}, "cosine"),
        ("dinov2-classifier", {}, "cosine"),
    ],
)
def test_each_output_has_its_measure(name, options, measure, photos):
    record = tuned(small(name), photos, name, **options).tuning
    assert record["measure"] == measure and record["before_se"] > 0 and record["held_out_images"] == 3


def test_with_all_tokens_back_all_tokens_are_matched(photos):
    record = tuned(small(dense=True), photos).tuning
    assert record["measure"] == "relative_l2" and record["before"] > 0


def test_the_error_before_is_that_of_the_pruned_model(photos):
    fast = small()
    record = tuned(fast, photos).tuning
    wanted = pb.load_probe(model_of("dinov2"), "cls", 1).pixel_format(42)
    from pullback.data.crops import read_crop
    from pullback.learning.train_head import readable_rows
    from pullback.pruning.tuning_images import split_rows

    rows = split_rows(readable_rows(photos, wanted), 0.25)[1]
    images = torch.stack([read_crop(row.item.read(), None, wanted) for row in rows]).double()
    errors = pb.cosine_degradation(fast(images).pooler_output, model_of("dinov2")(images).pooler_output)
    assert record["before"] == pytest.approx(float(errors.mean()))


def test_heads_and_their_scores_stay_frozen(photos):
    torch.manual_seed(0)
    head = ImportanceHead(24, 16, 4).double()
    state = copy.deepcopy(head.state_dict())
    better = tuned(pb.prune(model_of("dinov2"), head, ratio=0.5, stages=[0]), photos, steps=12, batch=8)
    assert all(torch.equal(state[key], value) for key, value in head.state_dict().items())
    assert all(value.grad is None for value in head.parameters()) and better.scores[0].head is head


def test_a_tuned_model_goes_on_from_its_vectors(photos):
    first = tuned(small(), photos, steps=12, batch=8)
    second = tuned(first, photos, steps=2)
    assert second.tuning["before"] == pytest.approx(first.tuning["after"])


def test_a_run_that_was_stopped_ends_as_one_that_was_not(photos, tmp_path):
    def stop(step, numbers):
        if step == 4:
            raise KeyboardInterrupt

    options = {"steps": 6, "batch": 8}
    whole = tuned(small(), photos, out=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        tuned(small(), photos, out=tmp_path / "parts", on_step=stop, **options)
    parts = tuned(small(), photos, out=tmp_path / "parts", **options)
    assert all(torch.equal(value, parts.vectors[key]) for key, value in whole.vectors.items())
    assert parts.tuning == whole.tuning
    rows = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6] and rows[0]["degradation_se"] > 0


def test_images_that_are_read_once_serve_several_tunings_and_change_none(photos):
    model, options = model_of("dinov2"), {"steps": 3, "batch": 4, "validate_every": 2, "learning_rate": 1e-3}
    original = pb.load_probe(model, "cls", device="cpu").backbone
    read = TuningImages(original, photos, held_out=0.25, size=42, remember=True)
    asked = count_calls(read)
    for ratio in (0.3, 0.5):
        shared = pb.tune(small(ratio=ratio), read, **options)
        alone = tuned(small(ratio=ratio), photos, **options)
        assert shared.tuning == alone.tuning
        assert all(torch.equal(value, alone.vectors[key]) for key, value in shared.vectors.items())
    assert asked() == 3  # the second tuning asks nothing that the first one has asked
    pb.tune(small(), read, **options, seed=1)
    assert asked() == 6
    pb.tune(small(dense=True), read, **options)  # all tokens are compared, of the same crops
    assert asked() == 9


def count_calls(read):
    asked, answer = [], read.answer
    read.answer = lambda key, ask: answer(key, lambda: (asked.append(key), ask())[1])
    return lambda: len(asked)


def test_images_that_were_read_for_another_model_are_refused(photos):
    other = copy.deepcopy(model_of("dinov2"))
    other.encoder.layer[0].norm1.weight.add_(0.1)
    read = TuningImages(pb.load_probe(other, "cls", device="cpu").backbone, photos, size=42)
    with pytest.raises(PullbackError, match=r"images: these were read for a model of other weights"):
        pb.tune(small(), read, batch=4)
    with pytest.raises(PullbackError, match=r"size, limit: images that were read before have theirs"):
        pb.tune(small(), read, batch=4, size=42)


def test_other_settings_are_refused_where_a_run_goes_on(photos, tmp_path):
    tuned(small(), photos, out=tmp_path)
    for options, name in (
        ({"seed": 1}, "seed"),
        ({"positions": True}, r"network\.positions"),
        ({"size": 28}, "size"),
        ({"held_out": 0.5}, "images"),
        ({"learning_rate": 1e-4}, "learning_rate"),
    ):
        with pytest.raises(PullbackError, match=rf"holds a training run with other settings .*{name}:"):
            tuned(small(), photos, out=tmp_path, **options)
    with pytest.raises(PullbackError, match=r"other settings .*pruned:"):
        tuned(small(ratio=0.3), photos, out=tmp_path)


def test_a_loss_that_is_no_number_is_refused_and_the_checkpoint_stays(photos, tmp_path):
    with pytest.raises(PullbackError, match=r"learning_rate: the loss is NaN or infinite after \d step"):
        tuned(small(), photos, learning_rate=1e300, validate_every=4)
    small_steps = {"steps": 30, "validate_every": 2, "out": tmp_path}
    with pytest.raises(PullbackError, match=r"learning_rate: "):
        tuned(small(), photos, learning_rate=1e300, **small_steps)
    assert not list(tmp_path.glob("checkpoint.pt"))
    with pytest.raises(PullbackError, match=r"pruned: its output for held-out images is NaN before any step"):
        broken = copy.deepcopy(model_of("dinov2"))
        broken.encoder.layer[2].norm2.bias.fill_(torch.nan)
        tuned(pb.prune(broken, "norm", ratio=0.5, stages=[0]), photos)


def test_too_few_images(photos, tmp_path):
    with pytest.raises(ImageError, match=r"images: expected at least the 10 images of a batch .* got 9, with 3 held"):
        tuned(small(), photos, batch=10)
    with pytest.raises(ImageError, match=r"images: expected at least two different images, .* got 1"):
        tuned(small(), write_pictures(tmp_path / "one", 1, broken=False))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match=r"images='.*no image found"):
        tuned(small(), tmp_path / "empty")
    with pytest.raises(ImageError, match=r"held_out='.*no image found"):
        tuned(small(), photos, held_out=tmp_path / "empty")
    with pytest.raises(ImageError, match=r"held_out: expected images that the network is not trained on"):
        tuned(small(), photos, held_out=photos)


def test_what_cannot_be_tuned(photos):
    with pytest.raises(ModelError, match=r"pruned: expected a pruned model, as .* got a Dinov2Model"):
        tuned(model_of("dinov2"), photos)
    training = pb.prune(copy.deepcopy(model_of("dinov2")), "norm", ratio=0.5, stages=[0])
    training.model.train()
    with pytest.raises(ModelError, match=r"pruned.model: expected evaluation mode"):
        tuned(training, photos)
    half = pb.prune(copy.deepcopy(model_of("dinov2")).bfloat16(), "norm", ratio=0.5, stages=[0])
    with pytest.raises(ModelError, match=r"pruned: expected weights in float32, got torch.bfloat16"):
        tuned(half, photos)
    with pytest.raises(PullbackError, match=r"match_hooks: Dinov2Model has no dense decoder"):
        tuned(small(), photos, match_hooks=1.0)
    with pytest.raises(ModelError, match=r"positions: .* has no position embeddings"):
        tuned(small("dinov3"), photos, "dinov3", positions=True)
    gone = pb.PrunedModel(model_of("tiny-scenes"), PrunePlan((0,), (0.5,), reinsert="none"), ["norm"])
    with pytest.raises(PullbackError, match=r"pruned: expected a plan that brings the tokens back"):
        tuned(gone, photos, "tiny-scenes")
    for share in (0.0, 1.5):
        with pytest.raises(PullbackError, match=r"held_out: expected a share between 0 and 1"):
            tuned(small(), photos, held_out=share)


def test_it_runs_in_bf16_and_compiled(photos):
    model = copy.deepcopy(model_of("dinov2")).float()
    better = tuned(pb.prune(model, "norm", ratio=0.5, stages=[0]), photos, precision="bf16")
    images = images_for("dinov2", (3, 3)).float()
    compiled = torch.compile(better, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images).pooler_output, better(images).pooler_output)
    assert isinstance(better, nn.Module)
