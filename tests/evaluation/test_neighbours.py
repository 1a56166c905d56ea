"""Votes on embeddings whose answer is known, and where the classes of images are found."""

import pytest
import torch

from pullback.errors import PullbackError
from pullback.evaluation import Bank, neighbour_accuracy
from pullback.evaluation.neighbours import classes_from_folders, classes_from_table, notes_on

TABLE = "file,split,class_index\ntrain/a.jpg,train,65\ntrain/b.jpg,train,7\nheldout/c.jpg,heldout,65\n"


def clusters(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    return torch.eye(8)[labels] + 0.05 * torch.randn(count, 8, generator=generator), labels


def test_separated_classes_are_all_found():
    assert neighbour_accuracy(*clusters(80, 0), *clusters(40, 1)) == 1.0


def test_labels_unrelated_to_the_embeddings_give_chance():
    bank, labels = clusters(400, 0)
    queries, truth = clusters(400, 1)
    shuffled = labels[torch.randperm(400, generator=torch.Generator().manual_seed(2))]
    assert abs(neighbour_accuracy(bank, shuffled, queries, truth) - 0.25) < 0.15


def test_nearer_neighbours_weigh_more():
    bank = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    labels = torch.tensor([0, 1, 1])
    assert neighbour_accuracy(bank, labels, torch.tensor([[1.0, 0.1]]), torch.tensor([0]), k=3) == 1.0


def test_a_table_names_files_relative_to_itself(tmp_path):
    (tmp_path / "labels.csv").write_text(TABLE)
    class_of = classes_from_table(tmp_path / "labels.csv")
    assert class_of(tmp_path / "train" / "a.jpg") == class_of(tmp_path / "heldout" / "c.jpg") == "65"
    assert class_of(tmp_path / "elsewhere" / "b.jpg") == "7", "a copy is found by its name"


def test_a_name_that_two_rows_share_decides_nothing(tmp_path):
    (tmp_path / "labels.csv").write_text(TABLE + "heldout/a.jpg,heldout,3\n")
    class_of = classes_from_table(tmp_path / "labels.csv")
    assert class_of(tmp_path / "heldout" / "a.jpg") == "3"
    with pytest.raises(PullbackError, match=r"labels: .* has no row for .*copy/a.jpg"):
        class_of(tmp_path / "copy" / "a.jpg")


def test_a_table_without_its_columns_is_refused(tmp_path):
    (tmp_path / "labels.csv").write_text("picture,kind\na,b\n")
    with pytest.raises(PullbackError, match=r"labels: expected a column file or path .* got picture, kind"):
        classes_from_table(tmp_path / "labels.csv")


def test_folders_are_classes(tmp_path):
    class_of = classes_from_folders(tmp_path)
    assert class_of(tmp_path / "cat" / "more" / "1.png") == "cat"
    with pytest.raises(PullbackError, match=r"labels: .*1.png lies in no class folder under"):
        class_of(tmp_path / "1.png")


def test_votes_of_a_known_bank():
    bank = Bank.of(torch.eye(3).repeat(5, 1), ["a", "b", "c"] * 5)
    queries = torch.eye(3)[[0, 1, 2, 0]] + 0.01
    assert bank.votes_right(queries, ["a", "b", "a", "unheard of"]) == [True, True, False, False]


def test_queries_of_other_classes_are_counted_and_refused_when_there_are_no_others():
    assert notes_on({"a", "b"}, ["a", "b"]) == []
    assert notes_on({"a", "b"}, ["a", "c"]) == ["1 image is of a class that the bank lacks: k-NN cannot be right."]
    assert notes_on({"a"}, ["a", "c", "d"]) == ["2 images are of classes that the bank lacks: k-NN cannot be right."]
    with pytest.raises(PullbackError, match=r"bank: none of 1 image is of a class in the bank \(2 classes\)"):
        notes_on({"a", "b"}, ["c"])
