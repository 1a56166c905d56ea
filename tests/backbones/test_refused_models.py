"""Models that must be refused, each with the reason and the fix in the message."""

import json

import huggingface_hub.constants
import pytest
import torch
import transformers as tf
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from helpers.families import model_of, save
from pullback.backbones import load_backbone
from pullback.backbones.loading import fetched_file, known_file
from pullback.errors import ModelError


@pytest.fixture
def saved(tmp_path):
    """The small DINOv2 as a folder."""
    model_of("dinov2").save_pretrained(tmp_path)
    return tmp_path


def test_an_unknown_model_is_refused(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = "model: 'nobody/no-such-model' is neither a folder .* nor an embedded model .*pullback ls"
    with pytest.raises(ModelError, match=message):
        load_backbone("nobody/no-such-model")


def test_a_folder_without_a_configuration_is_refused(saved):
    (saved / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config.json \(it holds \['model.safetensors'\]\)"):
        load_backbone(saved)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no config.json"):
        load_backbone(tmp_path)


def test_a_folder_without_weights_is_refused(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights .expected model.safetensors, found"):
        load_backbone(saved)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt"])
def test_a_pickled_checkpoint_is_refused(saved, file):
    state = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save(state, saved / file)
    with pytest.raises(ModelError, match=f"holds only a pickled checkpoint .{file}., which can run code"):
        load_backbone(saved)


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark) -> None:
        self.mark = mark

    def __reduce__(self):
        return type(self.mark).touch, (self.mark,)


@pytest.mark.parametrize(("name", "message"), [("dinov2", "has no model.safetensors"), ("vit", "could not be loaded")])
def test_a_pickled_checkpoint_beside_other_tensors_is_not_unpickled(name, message, tmp_path):
    mark = tmp_path / "unpickled"
    model_of(name).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "decoder.safetensors")
    torch.save({"bomb": Bomb(mark)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=message):
        load_backbone(tmp_path)
    assert not mark.exists()


def test_code_that_comes_with_a_model_is_not_run(saved, tmp_path):
    mark = tmp_path / "imported"
    (saved / "custom.py").write_text(f"open({str(mark)!r}, 'w')")
    config = json.loads((saved / "config.json").read_text())
    custom = {"model_type": "custom", "auto_map": {"AutoConfig": "custom.Config", "AutoModel": "custom.Model"}}
    (saved / "config.json").write_text(json.dumps(config | custom))
    with pytest.raises(ModelError, match="model: no adapter for transformers' model type 'custom'"):
        load_backbone(saved)
    assert not mark.exists()


# one family that is read here and one that transformers reads
READERS = pytest.mark.parametrize("name", ["dinov2", "vit"])


@READERS
@pytest.mark.parametrize("change", ["missing", "shape"])
def test_a_missing_weight_is_an_error_not_a_random_number(name, change, tmp_path):
    model_of(name).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    weight = state.pop("layernorm.weight")
    if change == "shape":
        state["layernorm.weight"] = weight[:-1].clone()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"lacks 1 weight that {name} needs.* layernorm.weight|could not be loaded"):
        load_backbone(tmp_path)


SHALLOWER = ("dinov2", "dinov2-registers", "dinov3", "clip", "siglip", "vit", "deit", "tiny-scenes")


@pytest.mark.parametrize("name", SHALLOWER)
def test_a_configuration_with_fewer_blocks_than_the_weights_is_refused(name, tmp_path):
    save(model_of(name), tmp_path)
    load_backbone(tmp_path, device="cpu")
    config = json.loads((tmp_path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("out_features", "out_indices", "stage_names")}
    field = "layers" if name == "tiny-scenes" else "num_hidden_layers"
    (tmp_path / "config.json").write_text(json.dumps(config | {field: config[field] - 1}))
    with pytest.raises(ModelError, match=r"holds weights of more blocks than its config.json asks for, \d+ .*Correct"):
        load_backbone(tmp_path, device="cpu")


@READERS
def test_truncated_weights_are_an_error(name, tmp_path):
    model_of(name).save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model: the weights of .* could not be loaded"):
        load_backbone(tmp_path)


@pytest.mark.parametrize("text", ["{not json", "[]", "{}", '"dinov2"'])
def test_a_broken_configuration_is_an_error(saved, text):
    (saved / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config.json is not a transformers configuration .JSON with a model_type."):
        load_backbone(saved)


def test_a_file_is_not_a_model(saved):
    with pytest.raises(ModelError, match=r"model: expected a folder or a hub id, got the file .*model.safetensors"):
        load_backbone(saved / "model.safetensors")


def test_a_model_of_another_kind_is_refused(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with pytest.raises(ModelError, match="model: no adapter for transformers' model type 'bert'"):
        load_backbone(saved)


def test_a_module_without_configuration_is_refused():
    with pytest.raises(
        ModelError, match="model: expected a transformers vision model, got Linear, which has no config"
    ):
        load_backbone(torch.nn.Linear(2, 2))


def test_a_model_in_train_mode_is_refused():
    model = tf.Dinov2Model(model_of("dinov2").config)
    with pytest.raises(ModelError, match=r"model: expected evaluation mode, .* Call model.eval\(\) first"):
        load_backbone(model.train())
    model.eval().encoder.train()
    with pytest.raises(ModelError, match="model: expected evaluation mode, but encoder and"):
        load_backbone(model)


@pytest.mark.parametrize("device", ["cuda:99", "no-such-device"])
def test_a_device_that_is_not_there_is_refused(device, saved):
    with pytest.raises(ModelError, match=f"device: '{device}' cannot be used here .*Try 'auto' or 'cpu'"):
        load_backbone(saved, device=device)


def test_a_module_stays_where_it_is_and_another_place_is_refused():
    model = model_of("dinov2")
    for device in ("auto", "cpu", torch.device("cpu")):
        assert load_backbone(model, device=device, dtype=torch.float64).model is model
    with pytest.raises(ModelError, match=r"device: a module is used where it is, which is 'cpu', got 'meta'. Move it"):
        load_backbone(model, device="meta")
    with pytest.raises(ModelError, match=r"dtype: a module is used as it is, in torch.float64, got torch.float32"):
        load_backbone(model, dtype=torch.float32)


def test_a_hub_that_cannot_be_reached_is_named_and_files_that_may_be_absent_are_taken_as_absent(monkeypatch):
    def unreachable(name, filename):
        raise LocalEntryNotFoundError("a long story\nof many lines")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(ModelError, match=r"the hub cannot be reached, and the cache has no config\.json of it"):
        load_backbone("facebook/dinov2-giant")
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        fetched_file("facebook/dinov2-giant", "model.safetensors")
    assert known_file("facebook/dinov2-giant", "model.safetensors.index.json") is None


def test_a_model_of_a_known_type_that_holds_no_vit_is_refused_with_what_is_missing():
    class Strange(torch.nn.Module):
        config = tf.ViTConfig()

    with pytest.raises(ModelError, match=r"model: Strange has none of layers, .* Expected a ViT of its family .*5\.17"):
        load_backbone(Strange().eval())


@pytest.mark.parametrize("kind", [tf.ViTForImageClassification, tf.ViTForMaskedImageModeling])
def test_a_model_with_something_on_top_of_its_vit_is_taken_apart_as_that_vit(kind):
    model = kind(model_of("vit").config).eval()
    assert load_backbone(model).model is model and load_backbone(model).depth == 3
