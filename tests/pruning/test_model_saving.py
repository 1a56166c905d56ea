"""Saved with its heads, loaded as it was."""

import copy
import json
import shutil

import pytest
import torch

import pullback as pb
from helpers.families import images_for, model_of
from pullback.errors import ModelError
from pullback.learning.head import ImportanceHead
from pullback.models.dinov2 import Dinov2, Dinov2Config


def pruned(model, **options):
    torch.manual_seed(0)
    heads = [ImportanceHead(24, 16, 4).double(), "class-attention"]
    return pb.prune(model, heads, **{"ratio": 0.5, "stages": [0, 1], **options})


@pytest.mark.parametrize("name", ["dinov2", "clip", "vit", "depth-v2", "tiny-scenes"])
def test_a_folder_gives_back_the_model_with_its_heads(name, tmp_path):
    fast, images = pruned(model_of(name)), images_for(name, (3, 3))
    again = pb.PrunedModel.from_pretrained(fast.save_pretrained(tmp_path)).double()
    assert again.plan == fast.plan
    assert type(again.model) is type(fast.model)
    for ours, theirs in zip(_values(again(images)), _values(fast(images)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def _values(output):
    fields = vars(output) if not isinstance(output, tuple) else output._asdict()
    return [value for value in fields.values() if isinstance(value, torch.Tensor)]


def test_our_own_network(tmp_path):
    config = Dinov2Config(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, image_size=42)
    fast, images = pruned(Dinov2(config).eval()).float(), torch.randn(2, 3, 42, 42)
    again = pb.PrunedModel.from_pretrained(fast.save_pretrained(tmp_path))
    torch.testing.assert_close(again(images).pooler_output, fast(images).pooler_output)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["tiny-scenes", "own dinov2", "dinov2"])
def test_the_dtype_comes_back(name, dtype, tmp_path):
    config = Dinov2Config(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, image_size=42)
    model = Dinov2(config).eval() if name == "own dinov2" else copy.deepcopy(model_of(name))
    fast = pruned(model).to(dtype)
    again = pb.PrunedModel.from_pretrained(fast.save_pretrained(tmp_path))
    state, expected = again.state_dict(), fast.state_dict()
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert state[key].dtype == value.dtype and torch.equal(state[key], value), key


def test_a_head_for_two_stages_comes_back_as_one(tmp_path):
    fast = pb.prune(model_of("dinov2"), ImportanceHead(24, 16, 4), ratio=0.5, stages=[0, 1])
    again = pb.PrunedModel.from_pretrained(fast.save_pretrained(tmp_path))
    assert again.scores[0].head is again.scores[1].head
    assert [path.name for path in (tmp_path / "heads").iterdir()] == ["0"]


def test_networks_of_d_task_where_older_folders_have_them(tmp_path):
    spn = pb.SpectralPullbackNetwork(24, rank=3, width=16, heads=4)
    fast = pb.prune(model_of("dinov2"), "norm", ratio=0.5, stages=[1], preset="paper", modes=spn)
    fast.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "pruned.json").read_text())
    document["modes"] = {"1": document["modes"]["1"]["class"]}
    (tmp_path / "pruned.json").write_text(json.dumps(document))
    (tmp_path / "modes").mkdir()
    (tmp_path / "heads" / "0").rename(tmp_path / "modes" / "1")
    again = pb.PrunedModel.from_pretrained(tmp_path)
    assert torch.equal(again.modes.networks["1"].project.weight, spn.project.weight)


def test_a_model_that_is_there_already(tmp_path):
    model, images = model_of("dinov2"), images_for("dinov2", (3, 3))
    fast = pruned(model)
    again = pb.PrunedModel.from_pretrained(fast.save_pretrained(tmp_path), model=model)
    assert again.model is model
    again.double()
    torch.testing.assert_close(again(images).pooler_output, fast(images).pooler_output, rtol=1e-5, atol=1e-5)


def test_a_folder_without_the_model_is_small_and_takes_it_as_an_argument(tmp_path):
    model, images = model_of("dinov2"), images_for("dinov2", (3, 3))
    fast = pruned(model)
    fast.save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path, weights=False)  # over one with the model, which is not left there
    assert not (tmp_path / "model").exists()
    again = pb.PrunedModel.from_pretrained(tmp_path, model=model)
    assert again.model is model
    assert torch.equal(again(images).pooler_output, fast(images).pooler_output)
    with pytest.raises(ModelError, match=r"has no model/"):
        pb.PrunedModel.from_pretrained(tmp_path)


def test_what_cannot_be_saved_is_refused(tmp_path):
    model = model_of("dinov2")
    own = pb.prune(model, lambda tokens, context: tokens.norm(dim=-1), ratio=0.5, stages=[0])
    with pytest.raises(ModelError, match="score: stage 0 uses a function of your own"):
        own.save_pretrained(tmp_path / "own")
    by_task = pb.prune(model, "norm", ratio=0.5, stages=[0], preset="paper", modes=lambda t, c: t[:, None])
    with pytest.raises(ModelError, match="the modes of d_task are a function"):
        by_task.save_pretrained(tmp_path / "by_task")
    mixed = pb.prune(model, [ImportanceHead(24, 16, 4), lambda t, c: t.norm(dim=-1)], ratio=0.5, stages=[0, 1])
    with pytest.raises(ModelError, match="score: stage 1 uses a function of your own"):
        mixed.save_pretrained(tmp_path / "mixed")
    assert not list(tmp_path.iterdir()), "nothing is left of what was refused"


def test_a_folder_that_holds_something_else(tmp_path):
    with pytest.raises(ModelError, match="holds no pruned model that can be read"):
        pb.PrunedModel.from_pretrained(tmp_path)
    fast = pruned(model_of("dinov2"))
    fast.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "pruned.json").read_text())
    document["class"] = "subprocess:Popen"
    (tmp_path / "pruned.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"names the class subprocess:Popen, which is neither"):
        pb.PrunedModel.from_pretrained(tmp_path)
    for address in ("transformers:Dinov9Model", "transformers.models.dinov9:Dinov9Model", "transformers:pipeline"):
        (tmp_path / "pruned.json").write_text(json.dumps(document | {"class": address}))
        with pytest.raises(ModelError, match=f"names the class {address}, which this release has not"):
            pb.PrunedModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["dinov2", "tiny-scenes"])
def test_a_folder_with_a_part_missing(name, tmp_path):
    fast = pruned(copy.deepcopy(model_of(name)))
    fast.save_pretrained(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="model"):
        pb.PrunedModel.from_pretrained(tmp_path)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ModelError, match=r"has no model/. Save the pruned model again, or pass .*, model=model\)"):
        pb.PrunedModel.from_pretrained(tmp_path)
    pb.PrunedModel.from_pretrained(tmp_path, model=fast.model)
    shutil.rmtree(tmp_path / "heads")
    with pytest.raises(ModelError, match=r"has no heads/0/, which pruned.json names"):
        pb.PrunedModel.from_pretrained(tmp_path, model=fast.model)
