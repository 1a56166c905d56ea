"""VGGT and its files: what is written is read back, from wherever it lies, and what does not fit is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import pullback as pb
from helpers.vggt_models import TINY, scenes, tiny
from pullback.errors import ModelError
from pullback.vggt import checkpoint as vggt_checkpoint

CONFIG = pb.VGGTConfig(**TINY)


@pytest.fixture(scope="module")
def model():
    return tiny(torch.float32)


@pytest.fixture
def folder(model, tmp_path):
    return model.save_pretrained(tmp_path / "saved")


def rewrite(folder, change):
    """The weights after ``change`` of the dictionary; returns the file."""
    path = folder / "model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)
    return path


def same(got, expected):
    assert list(got.state_dict()) == list(expected.state_dict())
    return all(torch.equal(value, got.state_dict()[name]) for name, value in expected.state_dict().items())


def test_a_saved_model_is_read_back_from_its_folder_and_from_its_file(model, folder):
    for name in (folder, str(folder), folder / "model.safetensors"):
        loaded = pb.VGGT.from_pretrained(name)
        assert type(loaded) is pb.VGGT and loaded.config == CONFIG and not loaded.training
        assert same(loaded, model)
    images = scenes(2, 3, 28, 28, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(loaded(images).depth, model(images).depth)


def test_loaded_parameters_can_be_trained_and_lie_on_the_device_in_the_dtype_asked_for(folder):
    loaded = pb.VGGT.from_pretrained(folder, device="cpu", dtype=torch.float64)
    assert all(p.requires_grad and p.dtype == torch.float64 and not p.is_meta for p in loaded.parameters())


def test_the_device_is_chosen_as_for_probes(folder):
    best = "cuda" if torch.cuda.is_available() else "cpu"
    assert pb.VGGT.from_pretrained(folder, device="auto").aggregator.camera_token.device.type == best
    with pytest.raises(ModelError, match="device: 'toaster' cannot be used here"):
        pb.VGGT.from_pretrained(folder, device="toaster")


def test_a_model_can_be_changed_and_saved_into_the_folder_it_came_from(folder, model):
    loaded = pb.VGGT.from_pretrained(folder)
    with torch.no_grad():
        loaded.camera_head.empty_pose_tokens.add_(1)
    loaded.save_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    again = pb.VGGT.from_pretrained(folder)
    torch.testing.assert_close(again.camera_head.empty_pose_tokens, model.camera_head.empty_pose_tokens + 1)
    assert torch.equal(again.aggregator.camera_token, model.aggregator.camera_token)


def test_half_precision_files_are_loaded_in_float32_unless_asked_otherwise(model, tmp_path):
    folder = tiny(torch.float16).save_pretrained(tmp_path)
    assert load_file(folder / "model.safetensors")["aggregator.camera_token"].dtype == torch.float16
    assert pb.VGGT.from_pretrained(folder).aggregator.camera_token.dtype == torch.float32


def test_a_file_alone_needs_the_config_it_was_made_with(model, folder):
    (folder / "config.json").unlink()
    assert same(pb.VGGT.from_pretrained(folder / "model.safetensors", config=CONFIG), model)
    with pytest.raises(ModelError, match=r"Pass the config= that they were made with"):
        pb.VGGT.from_pretrained(folder, config=pb.VGGTConfig(**{**TINY, "depth": 5}))


def test_a_config_with_few_fields_and_foreign_ones_keeps_the_other_sizes():
    stored = {"img_size": 518, "patch_size": 14, "embed_dim": 1024, "architectures": ["VGGT"]}
    assert pb.VGGTConfig.from_dict(stored) == pb.VGGTConfig()


def test_the_track_head_of_the_published_checkpoint_is_left_alone(model, folder):
    track = {"track_head.tracker.corr_mlp.fc1.weight": torch.zeros(3, 3)}
    rewrite(folder, lambda tensors: tensors.update(track))
    assert same(pb.VGGT.from_pretrained(folder), model)


def test_weights_of_a_head_that_the_config_leaves_out_are_left_alone(folder):
    config = pb.VGGTConfig(**TINY, heads=("camera", "depth"))
    loaded = pb.VGGT.from_pretrained(folder, config=config)
    assert loaded.point_head is None and loaded.depth_head is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("aggregator.camera_token"), r"1 missing: aggregator\.camera_token\."),
        (lambda t: t.update(extra=torch.zeros(1)), "1 unexpected: extra"),
        (
            lambda t: t.update({"camera_head.embed_pose.bias": torch.zeros(3)}),
            r"1 in another shape: camera_head\.embed_pose\.bias \[3\] instead of \[64\]",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if name.startswith("depth_head.projects")],
            r"8 missing: depth_head\.projects\.0\.weight, .*, and 5 more",
        ),
    ],
)
def test_missing_unexpected_and_misshapen_weights_are_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        pb.VGGT.from_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_weights_that_are_no_floating_point_numbers_are_named(folder, dtype):
    rewrite(folder, lambda t: t.update({"camera_head.embed_pose.bias": torch.ones(64, dtype=dtype)}))
    with pytest.raises(ModelError, match=r"1 not in floating point: camera_head\.embed_pose\.bias \((I64|BOOL)\)\."):
        pb.VGGT.from_pretrained(folder)


def test_names_are_compared_before_weights_are_read(folder, monkeypatch):
    """A wrong checkpoint of five gigabytes is refused by its header."""
    import safetensors

    path = rewrite(folder, lambda tensors: tensors.pop("aggregator.camera_token"))
    opened = safetensors.safe_open

    class HeaderOnly:
        def __init__(self, *args, **kwargs):
            self.file = opened(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *exc):
            return self.file.__exit__(*exc)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return self.file.get_slice(name)

        def get_tensor(self, name):
            raise AssertionError(f"{name} was read")

    monkeypatch.setattr(safetensors, "safe_open", HeaderOnly)
    with pytest.raises(ModelError, match="1 missing"):
        pb.VGGT.from_pretrained(path)


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".pth", ".ckpt"])
def test_pickled_checkpoints_are_refused(tmp_path, suffix):
    file = tmp_path / f"model{suffix}"
    file.write_bytes(b"never opened")
    with pytest.raises(ModelError, match="can run code when it is loaded, so it is refused"):
        pb.VGGT.from_pretrained(file)
    with pytest.raises(ModelError, match=f"holds only model{suffix}"):
        pb.VGGT.from_pretrained(tmp_path)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no such file: nowhere\.safetensors"):
        pb.VGGT.from_pretrained("nowhere.safetensors")
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        pb.VGGT.from_pretrained(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(ModelError, match=r"expected a \.safetensors file, a folder or a hub id"):
        pb.VGGT.from_pretrained(text)


@pytest.mark.parametrize("name", ["", None, 3])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ModelError, match=rf"name: expected a hub id, .* got {name!r}"):
        pb.VGGT.from_pretrained(name)


def test_a_config_must_be_one(folder):
    with pytest.raises(
        ModelError, match=r"config: expected a VGGTConfig, got a dict\. .*VGGTConfig\.from_dict\(config\)"
    ):
        pb.VGGT.from_pretrained(folder, config={"depth": 4})
    with pytest.raises(ModelError, match="config: expected a VGGTConfig, got a dict"):
        pb.VGGT.from_pretrained(folder, config={})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dpt_out_channels", [8.0, 8.0, 8.0, 8.0], r"expected a list of whole numbers, got \[8\.0, 8\.0, 8\.0, 8\.0\]"),
        ("hook_layers", [True, 1, 2, 3], r"expected a list of whole numbers, got \[True, 1, 2, 3\]"),
        ("hook_layers", 3, "expected a list of whole numbers, got 3"),
        ("heads", "camera", "expected a list of names, got 'camera'"),
        ("heads", [1], r"expected a list of names, got \[1\]"),
        ("layer_scale", None, "expected a number, got None"),
        ("rope_base", "100", "expected a number, got '100'"),
        ("mlp_ratio", float("nan"), "expected a number, got nan"),
        ("depth", 4.0, "expected a whole number of at least 1, got 4.0"),
    ],
)
def test_fields_of_another_kind_in_a_config_file_are_named(folder, field, value, message):
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), field: value}))
    with pytest.raises(ModelError, match=rf"name: {config}: {field}: {message}"):
        pb.VGGT.from_pretrained(folder)


def test_a_damaged_file_and_a_foreign_config_are_refused(folder):
    config = folder / "config.json"
    stored = json.loads(config.read_text())
    config.write_text(json.dumps({**stored, "model_type": "dinov2"}))
    with pytest.raises(ModelError, match="is the configuration of 'dinov2', expected 'vggt'"):
        pb.VGGT.from_pretrained(folder)
    config.write_text("[1, 2]")
    with pytest.raises(ModelError, match="is not a VGGT configuration"):
        pb.VGGT.from_pretrained(folder)
    config.write_text(json.dumps(stored))
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00nonsense")
    with pytest.raises(ModelError, match="could not be read"):
        pb.VGGT.from_pretrained(folder)


def test_a_hub_id_is_fetched_as_safetensors(folder, model, monkeypatch):
    asked = []

    def fetched(name, filename):
        asked.append((name, filename))
        return folder / filename

    monkeypatch.setattr(vggt_checkpoint, "fetched_file", fetched)
    monkeypatch.setattr(vggt_checkpoint, "known_file", fetched)
    assert same(pb.VGGT.from_pretrained("facebook/VGGT-1B"), model)
    assert asked == [("facebook/VGGT-1B", "model.safetensors"), ("facebook/VGGT-1B", "config.json")]


def test_a_hub_that_cannot_be_reached_is_an_error_in_words(monkeypatch):
    def unreachable(name, filename):
        raise OSError("no route to host\nand a long trace")

    monkeypatch.setattr(vggt_checkpoint, "fetched_file", unreachable)
    with pytest.raises(ModelError, match=r"nor a hub id that can be reached: no route to host\.$"):
        pb.VGGT.from_pretrained("facebook/VGGT-1B")
