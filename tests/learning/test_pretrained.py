"""Small networks as folders and on the hub (never the real one), and what they were made for."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from pullback.errors import ModelError
from pullback.learning.head import ImportanceHead
from pullback.learning.pretrained import CARD, CONFIG, WEIGHTS, Origin, Pretrained
from pullback.learning.s2vae import S2VAE
from pullback.learning.spn import SpectralPullbackNetwork

ORIGIN = Origin("dinov2", "0123abcd", 10, "cls", 20, ((224, 224), (518, 686)))
SCORES = {"spearman": 0.99812345678901, "V1": 1 / 3}
DIM = 12


def importance_head() -> Pretrained:
    return ImportanceHead(DIM, 32, 2).describe(origin=ORIGIN, scores=SCORES, target="block-norm")


def spectral_network() -> Pretrained:
    return SpectralPullbackNetwork(DIM, 3, 16, 2, blocks=1, floor=0.2).describe(origin=ORIGIN, scores=SCORES)


def latent_network() -> Pretrained:
    return SpectralPullbackNetwork(DIM, 3, 16, 2, latent=(4, 5)).describe(origin=ORIGIN, scores=SCORES)


@pytest.fixture(params=[importance_head, spectral_network, latent_network], ids=lambda make: make.__name__)
def model(request) -> Pretrained:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return request.param()


@pytest.fixture
def head() -> Pretrained:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return importance_head()


def outputs(model: Pretrained) -> list[torch.Tensor]:
    features = torch.randn(2, 7, DIM, generator=torch.Generator().manual_seed(0))
    result = model(features)
    return [result] if isinstance(result, torch.Tensor) else [result.modes, result.energies, torch.tensor(result.floor)]


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("there is no network here\nand a second line")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)


# ---- folders


def test_a_model_comes_back_from_its_folder_bit_for_bit(model, tmp_path, no_network):
    folder = model.save_pretrained(tmp_path / "made" / "here")
    assert folder == tmp_path / "made" / "here"
    with torch.random.fork_rng():
        torch.manual_seed(99)
        loaded = type(model).from_pretrained(folder)
    assert loaded.config == model.config
    assert (loaded.config.origin, loaded.config.scores) == (ORIGIN, SCORES)
    for ours, theirs in zip(outputs(loaded), outputs(model), strict=True):
        assert torch.equal(ours, theirs)
    assert not loaded.training


def test_a_folder_holds_three_files_and_may_be_written_twice(model, tmp_path, no_network):
    model.save_pretrained(tmp_path)
    model.describe(scores={"later": 0.5}).save_pretrained(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CONFIG, WEIGHTS, CARD])
    assert type(model).from_pretrained(str(tmp_path)).config.scores == {"later": 0.5}


def test_the_folder_of_a_training_is_as_good_as_the_model_in_it(head, tmp_path, no_network):
    head.save_pretrained(tmp_path / "run" / "model")
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"")
    again = ImportanceHead.from_pretrained(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))


def test_a_training_that_is_not_at_its_end_is_named(tmp_path, no_network):
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    with pytest.raises(ModelError, match=r"name: the training in .* has not come to its end, .* Run the same"):
        ImportanceHead.from_pretrained(tmp_path)


def test_a_model_that_was_never_described_comes_back_too(tmp_path):
    loaded = ImportanceHead.from_pretrained(ImportanceHead(DIM, 32).save_pretrained(tmp_path))
    assert loaded.config.origin == Origin()
    assert loaded.config.scores == {}


def test_config_json_can_be_read_by_anyone(model, tmp_path):
    model.save_pretrained(tmp_path)
    document = json.loads((tmp_path / CONFIG).read_text())
    assert document["kind"] == model.kind
    assert document["dim"] == DIM
    assert document["scores"] == SCORES
    assert document["origin"]["layer"] == 10
    assert document["origin"]["resolutions"] == [[224, 224], [518, 686]]


def test_the_card_says_what_it_is_what_it_was_made_for_and_how_good_it_is(model):
    card = model.card()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert card.startswith("---\nlibrary_name: pullback\n")
    for line in (
        f"# {model.title}",
        type(model).__doc__.splitlines()[0],
        "- family: dinov2",
        "- weights: 0123abcd",
        "- layer: 10",
        "- decoder: cls",
        "- resolutions: ((224, 224), (518, 686))",
        "| spearman | 0.9981 |",
        "| V1 | 0.3333 |",
        f"{count:,} parameters. Load it with",
        f"model = pb.{type(model).__name__}.from_pretrained(...)",
    ):
        assert line in card.splitlines()
    assert "No scores" not in card


def test_the_card_of_a_model_without_scores_says_so_and_names_only_what_is_known():
    card = ImportanceHead(DIM, 32).describe(origin=Origin(layer=0)).card()
    assert "No scores were measured." in card.splitlines()
    assert "| score" not in card
    assert "- layer: 0" in card.splitlines()
    assert "family" not in card
    assert "resolutions" not in card
    assert "Made for" not in ImportanceHead(DIM, 32).card()


def test_a_model_of_another_kind_is_refused(head, tmp_path):
    head.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds importance-head, expected spectral-pullback-network"):
        SpectralPullbackNetwork.from_pretrained(tmp_path)


@pytest.mark.parametrize("document", [{"model_type": "dinov2"}, ["a", "list"]], ids=["of another package", "a list"])
def test_a_model_that_is_not_ours_is_refused(document, tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps(document))
    with pytest.raises(ModelError, match="holds no model of this package, expected importance-head"):
        ImportanceHead.from_pretrained(tmp_path)


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS])
def test_a_missing_file_is_named(head, tmp_path, missing):
    (head.save_pretrained(tmp_path) / missing).unlink()
    with pytest.raises(ModelError, match=f"has no {re.escape(missing)}. Expected one written by save_pretrained"):
        ImportanceHead.from_pretrained(tmp_path)


def changed_config(folder: Path, **changes) -> None:
    document = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def test_weights_of_another_size_are_refused(head, tmp_path):
    changed_config(head.save_pretrained(tmp_path), dim=DIM + 1)
    with pytest.raises(ModelError, match=r"weights in .* do not fit its config.json: size mismatch for project.weight"):
        ImportanceHead.from_pretrained(tmp_path)


def test_missing_weights_are_named(head, tmp_path):
    tensors = load_file(head.save_pretrained(tmp_path) / WEIGHTS)
    save_file({name: value for name, value in tensors.items() if name != "out.bias"}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=r"do not fit its config.json: Missing key.* \"out.bias\""):
        ImportanceHead.from_pretrained(tmp_path)


def test_a_config_without_a_value_is_refused(head, tmp_path):
    changed_config(head.save_pretrained(tmp_path), width=None)
    with pytest.raises(ModelError, match=r"config.json in .* is not one of importance-head: KeyError\('width'\)"):
        ImportanceHead.from_pretrained(tmp_path)


def test_a_config_with_a_value_of_the_wrong_type_is_refused(head, tmp_path):
    changed_config(head.save_pretrained(tmp_path), width="wide")
    with pytest.raises(ModelError, match=r"config.json in .* is not one of importance-head: width: .* 'wide'"):
        ImportanceHead.from_pretrained(tmp_path)


def test_a_config_that_is_no_json_is_refused(head, tmp_path):
    (head.save_pretrained(tmp_path) / CONFIG).write_text("{half of it")
    with pytest.raises(ModelError, match=r"config.json in .* is no JSON: "):
        ImportanceHead.from_pretrained(tmp_path)


def test_weights_that_were_cut_off_are_refused(head, tmp_path):
    weights = head.save_pretrained(tmp_path) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors in .* cannot be read: .*Save it again"):
        ImportanceHead.from_pretrained(tmp_path)


# ---- the hub


def test_a_hub_id_is_downloaded_file_by_file(head, tmp_path, monkeypatch):
    head.save_pretrained(tmp_path)
    asked = []

    def download(repo_id: str, filename: str) -> str:
        asked.append((repo_id, filename))
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    loaded = ImportanceHead.from_pretrained("someone/head")
    assert asked == [("someone/head", CONFIG), ("someone/head", WEIGHTS)]
    assert torch.equal(outputs(loaded)[0], outputs(head)[0])


def test_a_name_that_leads_nowhere_is_refused_in_one_line(no_network):
    expected = r"name: 'someone/head' is neither a folder nor a hub id that can be reached: there is no network here$"
    with pytest.raises(ModelError, match=expected):
        ImportanceHead.from_pretrained("someone/head")


@pytest.mark.parametrize("name", ["missing", "/no/such/folder", "../missing", "a/b/c"])
def test_a_path_that_does_not_exist_is_refused_without_asking_the_hub(name, no_network):
    expected = (
        rf"name: '{re.escape(name)}' is neither a folder nor a hub id .*: there is no such folder, and an id of the"
    )
    with pytest.raises(ModelError, match=expected):
        ImportanceHead.from_pretrained(name)


def test_what_comes_with_the_package_has_a_name(no_network):
    assert S2VAE.from_pretrained("tiny-scenes-s2vae").config.origin.family == "tiny-scenes"
    with pytest.raises(ModelError, match="holds dpt-depth, expected s2vae"):
        S2VAE.from_pretrained("dinov2-small-depth")
    with pytest.raises(ModelError, match="'tiny-scenes' is neither a folder"):
        S2VAE.from_pretrained("tiny-scenes")  # a backbone


def test_push_to_hub_uploads_exactly_the_three_files(model, tmp_path, monkeypatch):
    calls = []

    class FakeApi:
        def __init__(self, token=None):
            calls.append(("login", token))

        def create_repo(self, repo_id, *, exist_ok, private):
            calls.append(("create", repo_id, exist_ok, private))

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            for path in Path(folder_path).rglob("*"):
                (tmp_path / path.relative_to(folder_path)).write_bytes(path.read_bytes())
            calls.append(("upload", repo_id, commit_message))
            return SimpleNamespace(commit_url="https://hub/commit/1")

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    assert model.push_to_hub("someone/head", private=True, token="secret") == "https://hub/commit/1"
    assert calls == [
        ("login", "secret"),
        ("create", "someone/head", True, True),
        ("upload", "someone/head", f"{model.title} of pullback"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CONFIG, WEIGHTS, CARD])
    for ours, theirs in zip(outputs(type(model).from_pretrained(tmp_path)), outputs(model), strict=True):
        assert torch.equal(ours, theirs)


# ---- what it was made for


@pytest.mark.parametrize(
    ("used_with", "message"),
    [
        ({"family": "clip"}, "head: it was trained for family dinov2, and is used with family clip"),
        ({"layer": 0}, "head: it was trained for layer 10, and is used with layer 0"),
        ({"weights": "ffff"}, "head: it was trained for weights 0123abcd, and is used with weights ffff"),
    ],
    ids=["family", "layer", "weights"],
)
def test_an_origin_refuses_what_it_was_not_made_for(used_with, message):
    right = {"family": "dinov2", "layer": 10, "weights": "0123abcd"}
    ORIGIN.check("head", **right)
    with pytest.raises(ModelError, match=message + r"\. Train one for this"):
        ORIGIN.check("head", **right | used_with)


def test_an_origin_does_not_check_what_is_not_known():
    Origin().check("head", family="clip", layer=3, weights="ffff")
    Origin(layer=3).check("head", family="clip", layer=3)
    ORIGIN.check("head", family="dinov2", layer=10, weights=None)
    with pytest.raises(ModelError, match="layer 0, and is used with layer 3"):
        Origin(layer=0).check("head", family="clip", layer=3)


def test_an_origin_comes_back_from_json():
    for origin in (ORIGIN, Origin()):
        stored = json.loads(json.dumps(vars(origin)))
        assert Origin.from_dict(stored | {"of a later version": 1}) == origin
    assert Origin.from_dict({"layer": 3}) == Origin(layer=3)
