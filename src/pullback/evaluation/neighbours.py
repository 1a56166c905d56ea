"""k-nearest-neighbour classification of embeddings: the bank, its votes, and where the classes of images are found."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.checks import finite_number, of_kind, whole_number
from pullback.errors import PullbackError, ShapeError, counted

NEIGHBOURS, TEMPERATURE = 20, 0.07
_AT_ONCE = 16_000_000  # similarities

ClassOf = Callable[[Path], str]
_FILE_COLUMNS = ("file", "path", "image", "filename")
_CLASS_COLUMNS = ("class_index", "class", "label", "wnid")


def vote(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, *, k: int = NEIGHBOURS, temperature: float = TEMPERATURE
) -> Tensor:
    """Return the label [m] that the k nearest of bank [n, D] with bank_labels [n] vote for, for each of queries [m, D].

    Nearest by cosine; a vote weighs exp(cosine / temperature).
    """
    _check_vote({"bank": bank, "bank_labels": bank_labels, "queries": queries}, k, temperature)
    _check_count("bank_labels", bank_labels, bank)
    similarity = F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T
    return _voted(similarity, bank_labels, min(k, len(bank)), temperature)


def leave_one_out(
    bank: Tensor,
    labels: Tensor,
    queries: Tensor,
    *,
    k: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
    which: Tensor | None = None,
) -> Tensor:
    """Return for each image whether the k nearest *other* images of the bank vote for its label, [n] bool.

    ``bank`` and ``queries`` [n, D] are embeddings of the same images in the same order, made in the same way or not,
    with labels [n]. ``which``: the images that ask, indices [m] or a mask [n]; the answer is [m] then.
    """
    _check_vote({"bank": bank, "labels": labels, "queries": queries}, k, temperature)
    _check_count("labels", labels, bank)
    if queries.shape != bank.shape or bank.ndim != 2 or len(bank) < 2:
        raise ShapeError(
            "bank, queries: expected embeddings [n, D] of the same n images, at least two, got "
            f"{list(bank.shape)} and {list(queries.shape)}."
        )
    asking = _asking(which, len(bank), bank.device)
    normalised = F.normalize(bank, dim=1)
    classes, own = labels.unique(return_inverse=True)  # votes are counted by class: numbers without holes
    right = []
    for rows in asking.split(max(1, _AT_ONCE // max(len(bank), len(classes)))):
        similarity = F.normalize(queries[rows], dim=1) @ normalised.T
        similarity.scatter_(1, rows[:, None], -torch.inf)
        right.append(_voted(similarity, own, min(k, len(bank) - 1), temperature) == own[rows])
    return torch.cat(right)


def _asking(which: Tensor | None, count: int, device: torch.device) -> Tensor:
    """Return the images that ask as indices."""
    if which is None:
        return torch.arange(count, device=device)
    of_kind("which", which, Tensor, "indices [m] or a mask [n]", ShapeError)
    if which.dtype == torch.bool and which.shape == (count,):
        which = which.nonzero()[:, 0]
    whole = not which.is_floating_point() and which.dtype != torch.bool
    if not (whole and which.ndim == 1 and len(which) and int(which.min()) >= 0 and int(which.max()) < count):
        raise ShapeError(
            f"which: expected indices from 0 to {count - 1}, at least one, or a mask [{count}] with one that is true, "
            f"got {which.dtype} {list(which.shape)}."
        )
    return which.to(device)


def _voted(similarity: Tensor, labels: Tensor, k: int, temperature: float) -> Tensor:
    """Return the label [m] with the most weight among the k nearest by similarity [m, n], labels being [n]."""
    nearest = similarity.topk(k, dim=1)
    weights = (nearest.values / temperature).exp()
    votes = weights.new_zeros(len(similarity), int(labels.max()) + 1)
    return votes.scatter_add_(1, labels[nearest.indices], weights).argmax(1)


def _check_vote(tensors: Mapping[str, Tensor], k: int, temperature: float) -> None:
    for name, values in tensors.items():
        of_kind(name, values, Tensor, "a tensor", ShapeError)
    whole_number("k", k)
    if finite_number("temperature", temperature, least=0, expected="a number above 0") == 0:
        raise PullbackError("temperature: expected a number above 0, got 0.")


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
