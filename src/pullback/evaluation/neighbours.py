"""k-nearest-neighbour classification of embeddings: the bank, its votes, and where the classes of images are found."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.checks import finite_number, of_kind, whole_number
from pullback.errors import PullbackError, ShapeError, counted

NEIGHBOURS, TEMPERATURE = 20, 0.07

ClassOf = Callable[[Path], str]
_FILE_COLUMNS = ("file", "path", "image", "filename")
_CLASS_COLUMNS = ("class_index", "class", "label", "wnid")


def vote(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, *, k: int = NEIGHBOURS, temperature: float = TEMPERATURE
) -> Tensor:
    """Return the label [m] that the k nearest of bank [n, D] with bank_labels [n] vote for, for each of queries [m, D].

    Nearest by cosine; a vote weighs exp(cosine / temperature).
    """
    for name, values in {"bank": bank, "bank_labels": bank_labels, "queries": queries}.items():
        of_kind(name, values, Tensor, "a tensor", ShapeError)
    whole_number("k", k)
    if finite_number("temperature", temperature, least=0, expected="a number above 0") == 0:
        raise PullbackError("temperature: expected a number above 0, got 0.")
    _check_count("bank_labels", bank_labels, bank)
    similarity = F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T
    nearest = similarity.topk(min(k, len(bank)), dim=1)
    classes = F.one_hot(bank_labels[nearest.indices], int(bank_labels.max()) + 1)
    return (classes * (nearest.values / temperature).exp()[..., None]).sum(1).argmax(1)


def _check_count(argument: str, labels: Tensor, rows: Tensor) -> None:
    if len(labels) != len(rows):
        raise PullbackError(f"{argument}: expected one for each of {counted(len(rows), 'row')}, got {len(labels)}.")


def neighbour_accuracy(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    labels: Tensor,
    *,
    k: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> float:
    """Return the share of queries [m, D] whose neighbours in the bank [n, D] vote for their label [m]."""
    found = vote(bank, bank_labels, queries, k=k, temperature=temperature)
    of_kind("labels", labels, Tensor, "a tensor", ShapeError)
    _check_count("labels", labels, queries)
    return (found == labels).double().mean().item()


@dataclass(frozen=True)
class Bank:
    """Embeddings [n, D] of known classes, which are numbered by ``numbers``."""

    embeddings: Tensor
    labels: Tensor  # [n]
    numbers: dict[str, int]

    @classmethod
    def of(cls, embeddings: Tensor, classes: Sequence[str]) -> Bank:
        numbers = {name: number for number, name in enumerate(sorted(set(classes)))}
        return cls(embeddings, torch.tensor([numbers[name] for name in classes]), numbers)

    def votes_right(self, embeddings: Tensor, classes: Sequence[str]) -> list[bool]:
        """Return for each of the embeddings [B, D] whether its neighbours vote for its class."""
        truth = torch.tensor([self.numbers.get(name, len(self.numbers)) for name in classes])
        return (vote(self.embeddings, self.labels, embeddings.cpu().float()) == truth).tolist()


def notes_on(known: Collection[str], classes: Sequence[str]) -> list[str]:
    """Return a warning if some queries are of classes that the bank, of ``known`` classes, lacks; raise an error if all
    are."""
    foreign = [name for name in classes if name not in known]
    if len(foreign) == len(classes):
        raise PullbackError(
            f"bank: none of {counted(len(classes), 'image')} is of a class in the bank "
            f"({counted(len(known), 'class', 'es')}), so k-NN cannot be right. Give a bank of the same classes, named "
            "in the same way."
        )
    are = "image is of a class" if len(foreign) == 1 else "images are of classes"
    return [f"{len(foreign)} {are} that the bank lacks: k-NN cannot be right."] if foreign else []


def classes_from_folders(root: Path) -> ClassOf:
    """Read classes from paths: one subfolder of ``root`` per class, as in torchvision's ImageFolder."""

    def class_of(file: Path) -> str:
        parts = file.resolve().relative_to(root.resolve()).parts if root.is_dir() else ()
        if len(parts) < 2:
            raise PullbackError(
                f"labels: {file} lies in no class folder under {root}. Sort the images into one folder per class, or "
                "name a table with --labels (columns file and class_index)."
            )
        return parts[0]

    return class_of


def classes_from_table(table: Path) -> ClassOf:
    """Read classes from a CSV with a column of files, relative to its own folder, and one of classes.

    A file that lies elsewhere is found by its name, if no two of the table share it.
    """
    try:
        with open(table, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            named = _column(table, columns, _FILE_COLUMNS)
            labelled = _column(table, columns, _CLASS_COLUMNS)
            rows = [(row[named], row[labelled]) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise PullbackError(f"labels: {table} cannot be read as a CSV ({reason}). Name another table.") from None
    by_path = {(table.parent / name).resolve(): label for name, label in rows}
    by_name = _unique((Path(name).name, label) for name, label in rows)

    def class_of(file: Path) -> str:
        label = by_path.get(file.resolve(), by_name.get(file.name))
        if label is None:
            raise PullbackError(
                f"labels: {table} has no row for {file}. Expected its path relative to {table.parent}, or its name."
            )
        return label

    return class_of


def _column(table: Path, columns: Sequence[str], wanted: Sequence[str]) -> str:
    for name in wanted:
        if name in columns:
            return name
    raise PullbackError(f"labels: expected a column {' or '.join(wanted)} in {table}, got {', '.join(columns)}.")


def _unique(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the pairs whose first item occurs once."""
    listed = list(pairs)
    counts = Counter(name for name, _ in listed)
    return {name: label for name, label in listed if counts[name] == 1}
