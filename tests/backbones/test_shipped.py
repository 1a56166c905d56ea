"""Fingerprints of weights survive casts and storage, and find what was trained for them."""

import copy
import json
from dataclasses import asdict, replace

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import pullback as pb
from helpers.families import SMALL_MODELS, model_of, save
from pullback import models
from pullback.backbones.loading import load_any_backbone
from pullback.backbones.shipped import fingerprint, has_fingerprint, shipped
from pullback.errors import DecoderError, ModelError
from pullback.learning.pretrained import Origin
from pullback.models import EMBEDDED
from pullback.runs.files import write_network

FIX = "Train one: python recipes/dinov2_depth.py."


def dinov2(dtype: torch.dtype = torch.float32, **changes: int) -> torch.nn.Module:
    """The small DINOv2 of the tests, or one of another size."""
    if not changes:
        return copy.deepcopy(model_of("dinov2")).to(dtype)
    torch.manual_seed(0)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size", "image_size", "mlp_ratio")
    same = {name: getattr(model_of("dinov2").config, name) for name in sizes}
    return tf.Dinov2Model(tf.Dinov2Config(**same | changes)).to(dtype).eval()


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """The folder in which things ship, with a depth head for the small DINOv2 in it."""
    folder = tmp_path / "weights"
    monkeypatch.setattr(models, "WEIGHTS", folder)
    known = fingerprint(pb.load_backbone(dinov2()))
    write_network(folder / "small-depth", torch.nn.Linear(2, 2), {"kind": "dpt", "hooks": [0, 2], "fingerprint": known})
    (folder / "embedded").mkdir()
    (folder / "embedded" / "config.json").write_text('{"model_type": "tiny_scenes"}')
    return folder


def stored(model: torch.nn.Module, dtype: torch.dtype, folder) -> torch.nn.Module:
    """The model after its weights were written in another dtype and read back into float32."""
    save_file({name: value.to(dtype).contiguous() for name, value in model.state_dict().items()}, folder / "w")
    model.load_state_dict(load_file(folder / "w"))
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_it_is_found_for_a_copy_in_any_dtype(weights, dtype):
    backbone = pb.load_backbone(dinov2(dtype))
    assert shipped("dpt", backbone, fix=FIX, hooks=(0, 2)) == weights / "small-depth"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_found_after_storage_in_a_coarser_dtype(weights, dtype, tmp_path):
    model = stored(dinov2(), dtype, tmp_path)
    assert next(model.parameters()).dtype == torch.float32
    assert shipped("dpt", pb.load_backbone(model), fix=FIX) == weights / "small-depth"


@pytest.mark.parametrize("one", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16, torch.float32])
def test_a_fingerprint_of_a_coarse_copy_is_that_of_the_others(one, other):
    known = fingerprint(pb.load_backbone(dinov2(one)))
    assert has_fingerprint(json.loads(json.dumps(known)), pb.load_backbone(dinov2(other)))


def test_it_is_found_for_our_own_class_and_for_a_classifier_made_of_the_model(weights, tmp_path):
    save(dinov2(), tmp_path / "model")
    own = pb.load_backbone(tmp_path / "model")
    assert "transformers" not in type(own.model).__module__
    assert shipped("dpt", own, fix=FIX) == weights / "small-depth"
    classifier = tf.Dinov2ForImageClassification(tf.Dinov2Config(**dinov2().config.to_dict() | {"num_labels": 3}))
    classifier.dinov2.load_state_dict(dinov2().state_dict())
    assert shipped("dpt", pb.load_backbone(classifier.eval()), fix=FIX) == weights / "small-depth"


def test_another_mask_token_and_positions_for_another_size_are_the_same_model(weights):
    other = dinov2(image_size=70)
    weights_of = {name: value for name, value in dinov2().state_dict().items() if "position" not in name}
    other.load_state_dict(weights_of, strict=False)
    other.embeddings.mask_token.data.normal_()
    other.embeddings.position_embeddings.data.normal_()
    assert shipped("dpt", pb.load_backbone(other), fix=FIX) == weights / "small-depth"


def test_one_changed_block_is_another_model(weights):
    model = dinov2()
    with torch.no_grad():
        for value in model.encoder.layer[1].parameters():
            value.mul_(1.01)
    with pytest.raises(ModelError, match=r"is of this family .* other weights, .*: they differ in block 1\. Train one"):
        shipped("dpt", pb.load_backbone(model), fix=FIX)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fine_tuning_of_all_weights_is_seen_in_every_dtype(weights, dtype):
    model, generator = dinov2(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.02 * value.std() * torch.randn(value.shape, generator=generator))
    with pytest.raises(ModelError, match=r"they differ in block 0 and 3 other parts\. Train"):
        shipped("dpt", pb.load_backbone(model.to(dtype)), fix=FIX)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 48},
            r"3 blocks of width 48\. small-depth is made for width 24, this model has 48",
        ),
        ({"num_hidden_layers": 2}, "small-depth is made for depth 3, this model has 2"),
        ({"num_attention_heads": 2}, "small-depth is made for heads 3, this model has 2"),
        ({"patch_size": 7}, "small-depth is made for patch size 14, this model has 7"),
        ({"mlp_ratio": 4}, "other weights"),
    ],
)
def test_a_model_of_another_size_is_told_what_there_is(weights, changes, message):
    with pytest.raises(ModelError, match=message):
        shipped("dpt", pb.load_backbone(dinov2(**changes)), fix=FIX)


def test_another_family_kind_or_field_is_told_what_there_is(weights):
    backbone = pb.load_backbone(dinov2())
    with pytest.raises(ModelError, match="small-depth is made for family dinov2, this model has vit"):
        shipped("dpt", pb.load_backbone(model_of("vit")), fix=FIX)
    with pytest.raises(DecoderError, match=r"no s2vae that comes with the package fits .* None of this kind comes"):
        shipped("s2vae", backbone, fix=FIX, error=DecoderError)
    with pytest.raises(ModelError, match=r"small-depth is made for hooks \[0, 2\], not \(0, 1\)"):
        shipped("dpt", backbone, fix=FIX, hooks=(0, 1))


def test_a_network_with_an_origin_is_found_by_it(weights):
    backbone = pb.load_backbone(dinov2())
    head = pb.ImportanceHead(24)
    origin = replace(head.config.origin, decoder="depth", fingerprint=fingerprint(backbone))
    head.describe(origin=origin).save_pretrained(weights / "a-head")
    assert shipped(head.kind, backbone, fix=FIX, decoder="depth") == weights / "a-head"
    with pytest.raises(ModelError, match="a-head is made for decoder depth, not cls"):
        shipped(head.kind, backbone, fix=FIX, decoder="cls")
    assert pb.ImportanceHead.from_pretrained(weights / "a-head").config.origin == origin
    assert "fingerprint" not in head.card() and asdict(Origin())["fingerprint"] == {}


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_every_family_has_a_fingerprint(name):
    model = model_of(name)
    known = fingerprint(load_any_backbone(model))
    assert has_fingerprint(json.loads(json.dumps(known)), load_any_backbone(copy.deepcopy(model).half()))
    assert len(known["weights"]) == SMALL_MODELS[name].depth + 1 and all(known["weights"].values())


def test_networks_without_blocks_are_compared_by_their_parameters():
    backbone = load_any_backbone("tiny-views", device="cpu")
    known = fingerprint(backbone)
    assert has_fingerprint(known, load_any_backbone("tiny-views", device="cpu", dtype=torch.bfloat16))
    assert not any("pos_embed" in name for name in known["weights"])
    changed = copy.deepcopy(backbone.model)
    with torch.no_grad():
        next(changed.aggregator.parameters()).add_(1)
    assert not has_fingerprint(known, load_any_backbone(changed))


def test_quantised_weights_have_none():
    model = dinov2()
    linear = model.encoder.layer[0].mlp.fc1
    linear.weight = torch.nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match=r"weights of Dinov2Model are quantised \(torch.int8\), .* Load them in"):
        fingerprint(pb.load_backbone(model))


def test_all_that_comes_with_the_package_is_a_model_or_has_a_kind_and_a_fingerprint():
    folders = sorted(path for path in models.WEIGHTS.iterdir() if path.is_dir())
    assert {path.name for path in folders} >= set(EMBEDDED)
    groups = {folder for folder in folders if folder.name.endswith("-heads")}  # one folder for each head
    assert all((group / "README.md").is_file() for group in groups)
    each = [folder for folder in folders if folder not in groups]
    for folder in [*each, *(path for group in groups for path in group.iterdir() if path.is_dir())]:
        assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in folder.iterdir()}
        if folder.name not in EMBEDDED:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            assert config["kind"] and (config.get("fingerprint") or config["origin"]["fingerprint"])
