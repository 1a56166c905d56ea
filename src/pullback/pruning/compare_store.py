"""The folder of a comparison: settings that must stay, and rows that are never computed twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pullback.errors import PullbackError
from pullback.pruning.compare_subject import Combination
from pullback.runs.documents import ROWS, SETTINGS
from pullback.runs.files import write_json, write_text

NOT_COMPARED = ("pullback", "commit", "model", "device")
"""The weights' hash says which model it is; another version or machine may go on."""
MAY_BE_ADDED = ("head",)
"""Rows without it do not depend on it."""

Key = tuple[str, str, float]


class RowStore:
    """rows.jsonl: one line per image and combination, appended as they are computed."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / SETTINGS
        stored = _read_settings(path) if path.is_file() else {}
        if stored:
            check_same(stored, settings, folder)
        kept = {name: stored[name] for name in MAY_BE_ADDED if settings.get(name) is None and name in stored}
        self.folder, self.settings = folder, {**settings, **kept}
        self._rows: dict[Key, dict[str, dict[str, Any]]] = {}
        for row in self._read():
            self._remember(row)
        write_json(path, self.settings)

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._rows.values())

    def has(self, combination: Combination, image: str) -> bool:
        return image in self._rows.get(_key(combination), {})

    def of(self, combination: Combination) -> dict[str, dict[str, Any]]:
        """The rows of a combination by image, in the order in which they came."""
        return self._rows.get(_key(combination), {})

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        new = list(rows)
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in new)
        with open(self.folder / ROWS, "a", encoding="utf-8") as file:
            file.write(text)
        for row in new:
            self._remember(row)

    def _remember(self, row: dict[str, Any]) -> None:
        self._rows.setdefault((row["preset"], row["score"], row["ratio"]), {})[row["image"]] = row

    def _read(self) -> list[dict[str, Any]]:
        """All whole lines; half a line at the end, of a run that was killed, is cut off."""
        path = self.folder / ROWS
        if not path.is_file():
            return []
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write_text(path, whole)
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except json.JSONDecodeError as error:
            raise PullbackError(f"out: {path} has a line that is no JSON ({error}). Choose another folder.") from None


def check_same(stored: Mapping[str, Any], asked: Mapping[str, Any], folder: Path) -> None:
    """Refuse to mix rows of different settings, naming every difference."""
    different = [
        name
        for name in {**stored, **asked}
        if name not in NOT_COMPARED
        and stored.get(name) != asked.get(name)
        and not (name in MAY_BE_ADDED and None in (stored.get(name), asked.get(name)))
    ]
    if different:
        listing = "; ".join(f"{name}: {stored.get(name)!r} there, {asked.get(name)!r} asked for" for name in different)
        raise PullbackError(
            f"out: {folder} holds a comparison with other settings ({listing}). More ratios, scores, presets or images "
            "may be added with the same settings; for others choose another folder."
        )


def folder_hash(folder: Path) -> str:
    """Of the weights in a folder of `save_pretrained`; of a hub id its name."""
    path = folder / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else str(folder)


def _key(combination: Combination) -> Key:
    return combination.preset, combination.score, combination.ratio


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise PullbackError(f"out: {path} is no JSON ({error}). Choose another folder.") from None
    return document
