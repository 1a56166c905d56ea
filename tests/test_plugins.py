"""Entries of users: they are added, replaced, listed in help and `pullback ls`, and found in plugins."""

import importlib.metadata
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

import pullback as pb
from helpers.registry import kept_tables
from pullback import registry
from pullback.cli import app, options
from pullback.errors import PullbackError


@pytest.fixture(autouse=True)
def tables():
    """What a test registers is gone afterwards, and plugins are not loaded yet."""
    with kept_tables():
        yield


def register_three() -> None:
    """What a plugin does."""
    pb.register_backbone(pb.BackboneEntry("my-vit", ("my_vit",), "my.models:adapt", ("cls", "my-head"), "me/my-vit"))
    pb.register_decoder(pb.DecoderEntry("my-head", "my.heads:build", "what my head says"))
    pb.register_score(pb.ScoreEntry("my-score", "my.scores:score", "how much I like a token"))


def ls() -> str:
    """What `pullback ls` prints."""
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(app, ["ls"]).output


def test_registered_entries_are_listed_with_what_they_are():
    assert "my-vit" not in ls()
    register_three()
    listed = ls()
    for words in ("my-vit", "cls, my-head", "me/my-vit", "my_vit", "what my head says", "how much I like a token"):
        assert words in listed, words
    assert "my-head" in options.decoder_help()


def test_a_decoder_of_one_family_is_named_with_its_family():
    pb.register_decoder(pb.DecoderEntry("my-head", "my.heads:build", "what my head says", family="my-vit"))
    assert "of my-vit: my-head" in options.decoder_help()


def test_an_entry_of_the_same_name_is_replaced():
    for words in ("first", "second"):
        pb.register_decoder(pb.DecoderEntry("my-head", "my.heads:build", words))
        pb.register_score(pb.ScoreEntry("my-score", "my.scores:score", words))
        pb.register_backbone(pb.BackboneEntry("my-vit", (), "my.models:adapt", (), words))
    assert [entry.help for entry in registry.DECODERS if entry.name == "my-head"] == ["second"]
    assert (registry.SCORES["my-score"].help, registry.BACKBONES["my-vit"].example) == ("second", "second")


def test_a_decoder_for_one_family_stands_beside_the_one_for_all():
    pb.register_decoder(pb.DecoderEntry("my-head", "my.heads:build", "for all"))
    pb.register_decoder(pb.DecoderEntry("my-head", "my.heads:build", "for one", family="my-vit"))
    assert sorted(entry.help for entry in registry.DECODERS if entry.name == "my-head") == ["for all", "for one"]


def test_names_with_numbers_are_matched_by_their_pattern():
    sized = pb.DecoderEntry("grid-GxG", "my.heads:build", "averaged down", r"grid-(\d+)x(\d+)")
    found = sized.match("grid-8x4")
    assert found is not None and found.groups() == ("8", "4")
    assert sized.match("grid-8") is None
    plain = pb.DecoderEntry("a+b", "my.heads:build", "its name is no pattern")
    assert plain.match("a+b") and not plain.match("aab")


def test_code_is_imported_when_it_is_asked_for():
    assert registry.resolve("pullback.errors:PullbackError") is PullbackError
    assert registry.resolve(register_three) is register_three
    with pytest.raises(PullbackError, match=r"expected 'package\.module:name', got 'pullback\.errors'"):
        registry.resolve("pullback.errors")
    with pytest.raises(PullbackError, match=r"pullback\.errors has no 'Nothing'"):
        registry.resolve("pullback.errors:Nothing")


def plug_in(monkeypatch, function: str) -> None:
    """Pretend that a package with this entry point is installed."""
    point = EntryPoint("mine", f"test_my_plugin:{function}", registry.GROUP)
    found = {registry.GROUP: [point]}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: found.get(group, []))


@pytest.fixture
def plugin(tmp_path, monkeypatch) -> None:
    """A package of somebody else's."""
    (tmp_path / "test_my_plugin.py").write_text(
        "import pullback as pb\n"
        "calls = []\n"
        "def register():\n"
        "    calls.append(1)\n"
        "    pb.register_score(pb.ScoreEntry('plugged', 'my.scores:score', 'of a plugin'))\n"
        "def broken():\n"
        "    raise ImportError('no such library')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_plugins_are_found_through_their_entry_point_and_called_once(plugin, monkeypatch):
    plug_in(monkeypatch, "register")
    assert "plugged" in ls() and "of a plugin" in ls()
    assert registry.load_plugins() == ("mine",)
    import test_my_plugin

    assert test_my_plugin.calls == [1]


def test_a_plugin_that_cannot_be_loaded_is_named(plugin, monkeypatch):
    plug_in(monkeypatch, "broken")
    with pytest.raises(PullbackError, match=r"plugin 'mine' \(test_my_plugin:broken\) could not be loaded: .*no"):
        registry.load_plugins()
    assert "error: plugin 'mine'" in ls()
