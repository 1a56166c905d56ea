"""Votes on embeddings whose answer is known, and where the classes of images are found."""

import pytest
import torch

from pullback.errors import PullbackError, ShapeError
from pullback.evaluation import Bank, neighbour_accuracy
from pullback.evaluation.neighbours import classes_from_folders, classes_from_table, leave_one_out, notes_on, vote

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


def test_of_four_images_everyone_asks_the_other_three():
    angles = torch.tensor([0.0, 0.1, 1.0, 1.05])
    bank, labels = torch.stack([angles.cos(), angles.sin()], 1), torch.tensor([7, 7, 7, 2])
    assert leave_one_out(bank, labels, bank, k=1).tolist() == [True, True, False, False]
    assert leave_one_out(bank, labels, bank, k=3, temperature=100.0).tolist() == [True, True, True, False]
    # asked by what lies where the fourth is, the third finds the second nearest, and itself it may not name
    queries = bank[[0, 1, 1, 0]]
    assert leave_one_out(bank, labels, queries, k=1).tolist() == [True, True, True, False]


def test_leaving_one_out_is_a_vote_without_it_also_in_parts(monkeypatch):
    bank, labels = clusters(60, 0)
    queries = bank + 0.5 * torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    labels = 3 * labels + 5  # numbers with holes
    alone = []
    for image in range(60):
        others = torch.arange(60) != image
        alone.append(bool(vote(bank[others], labels[others], queries[image : image + 1], k=7) == labels[image]))
    assert 0 < sum(alone) < 60
    monkeypatch.setattr("pullback.evaluation.neighbours._AT_ONCE", 60 * 11)
    assert leave_one_out(bank, labels, queries, k=7).tolist() == alone
    some = torch.tensor([59, 3, 17])
    assert leave_one_out(bank, labels, queries, k=7, which=some).tolist() == [alone[image] for image in some]
    mask = torch.arange(60) % 3 == 0
    assert leave_one_out(bank, labels, queries, k=7, which=mask).tolist() == alone[::3]


def test_more_neighbours_than_images_are_all_of_them():
    bank, labels = clusters(8, 0)
    assert leave_one_out(bank, labels, bank, k=50).equal(leave_one_out(bank, labels, bank, k=7))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": 0}, "k: expected a whole number of at least 1, got 0"),
        ({"temperature": 0}, "temperature: expected a number above 0, got 0"),
        ({"labels": torch.zeros(3)}, "labels: expected one for each of 8 rows, got 3"),
        ({"queries": torch.ones(7, 8)}, r"bank, queries: .* of the same n images, .* got \[8, 8\] and \[7, 8\]"),
        ({"which": torch.tensor([8])}, r"which: expected indices from 0 to 7, .* mask \[8\]"),
        ({"which": torch.zeros(8, dtype=torch.bool)}, r"which: expected indices from 0 to 7"),
        ({"which": [0]}, "which: expected indices"),
    ],
)
def test_wrong_arguments_of_leave_one_out_are_refused(changed, message):
    bank, labels = clusters(8, 0)
    arguments = {"bank": bank, "labels": labels, "queries": bank, **changed}
    with pytest.raises((PullbackError, ShapeError), match=message):
        leave_one_out(arguments.pop("bank"), arguments.pop("labels"), arguments.pop("queries"), **arguments)
