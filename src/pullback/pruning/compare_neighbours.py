"""k-NN accuracy of pruned embeddings: a bank of unpruned ones, and where the classes of images are written."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pullback.errors import ImageError, PullbackError
from pullback.evaluation import neighbour_accuracy
from pullback.runs.files import write_arrays

NEIGHBOURS, TEMPERATURE = 20, 0.07

ClassOf = Callable[[Path], str]
_FILE_COLUMNS = ("file", "path", "image", "filename")
_CLASS_COLUMNS = ("class_index", "class", "label", "wnid")


@dataclass(frozen=True)
class Bank:
    """Unpruned embeddings [n, D] with their classes, numbered by ``numbers``."""

    embeddings: Tensor
    labels: Tensor  # [n]
    numbers: dict[str, int]

    @classmethod
    def of(cls, embeddings: Tensor, classes: Sequence[str]) -> Bank:
        numbers = {name: number for number, name in enumerate(sorted(set(classes)))}
        return cls(embeddings, torch.tensor([numbers[name] for name in classes]), numbers)

    def notes_on(self, classes: Sequence[str]) -> list[str]:
        """Refuse queries of other classes alone; say how many there are."""
        foreign = [name for name in classes if name not in self.numbers]
        if len(foreign) == len(classes):
            raise PullbackError(
                f"bank: none of the {len(classes)} images is of a class in the bank ({len(self.numbers)} classes), so "
                "k-NN cannot be right. Give a bank of the same classes, named in the same way."
            )
        return [f"{len(foreign)} images are of classes that the bank lacks: k-NN cannot be right."] if foreign else []

    def votes_right(self, embeddings: Tensor, classes: Sequence[str]) -> list[bool]:
        """For each of the embeddings [B, D], whether its neighbours vote for its class (k = 20, T = 0.07)."""
        truth = torch.tensor([self.numbers.get(name, len(self.numbers)) for name in classes])
        return [
            neighbour_accuracy(
                self.embeddings, self.labels, query[None], label[None], k=NEIGHBOURS, temperature=TEMPERATURE
            )
            == 1.0
            for query, label in zip(embeddings.cpu().float(), truth, strict=True)
        ]


def read_bank(
    path: Path, images: Iterator[tuple[list[Path], Tensor]], embed: Callable[[Tensor], Tensor], class_of: ClassOf
) -> Bank:
    """The bank stored at ``path``, or computed from batches of images and stored there."""
    if path.is_file():
        with np.load(path, allow_pickle=False) as arrays:
            return Bank.of(torch.from_numpy(arrays["embeddings"]), arrays["classes"].tolist())
    parts: list[Tensor] = []
    classes: list[str] = []
    for files, pixels in images:
        classes += [class_of(file) for file in files]
        parts.append(embed(pixels).cpu().float())
    if not parts:
        raise ImageError("bank: expected images that can be read, got none.")
    embeddings = torch.cat(parts)
    write_arrays(path, {"embeddings": embeddings.numpy(), "classes": np.array(classes)})
    return Bank.of(embeddings, classes)


def classes_from_folders(root: Path) -> ClassOf:
    """One subfolder of ``root`` per class, as in torchvision's ImageFolder."""

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
    """A CSV with a column of files, relative to its own folder, and one of classes; a file that lies elsewhere is found
    by its name, if no two of the table share it."""
    with open(table, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        named = _column(table, columns, _FILE_COLUMNS)
        labelled = _column(table, columns, _CLASS_COLUMNS)
        rows = [(row[named], row[labelled]) for row in reader]
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
    found: dict[str, str] = {}
    twice = set()
    for name, label in pairs:
        if name in found:
            twice.add(name)
        found[name] = label
    return {name: label for name, label in found.items() if name not in twice}
