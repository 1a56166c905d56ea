"""A folder belongs to one kind of run, and the error says to which."""

from itertools import permutations

import pytest

from pullback.errors import PullbackError
from pullback.runs.folder import KINDS, claim_folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_folder_is_made_and_one_of_the_same_kind_is_taken_again(tmp_path, kind):
    folder = tmp_path / "new" / "folder"
    assert claim_folder(folder, kind) == folder and folder.is_dir()
    (folder / "notes.txt").write_text("mine")
    for name in KINDS[kind].files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
        assert claim_folder(folder, kind) == folder
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(("kind", "other"), list(permutations(KINDS, 2)))
def test_a_folder_of_another_kind_is_refused_by_any_of_its_files(tmp_path, kind, other):
    for name in KINDS[other].files:
        folder = tmp_path / name.replace("/", "-")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")
        with pytest.raises(PullbackError, match=rf"out: .* holds {KINDS[other].holds} \({name}.*Choose another --out"):
            claim_folder(folder, kind)


def test_the_message_names_the_command_that_wrote_it(tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(PullbackError, match=r"holds a comparison of pruning rules \(rows.jsonl of `pullback prune`\)"):
        claim_folder(tmp_path, "diagnose")
    (tmp_path / "rows.jsonl").rename(tmp_path / "model.safetensors")
    with pytest.raises(PullbackError, match=r"holds the weights of a model \(model.safetensors\), and a folder"):
        claim_folder(tmp_path, "diagnose")


def test_a_mixture_of_an_earlier_version_goes_on_as_either(tmp_path):
    for name in ("diagnosis.json", "rows.jsonl"):
        (tmp_path / name).write_text("{}")
    assert claim_folder(tmp_path, "diagnose") == claim_folder(tmp_path, "prune") == tmp_path
