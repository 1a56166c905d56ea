"""What is written about tiny-scenes was measured on the weights that are shipped, and is what its commands print."""

import json
from pathlib import Path

import pytest

from pullback.models import EMBEDDED
from recipes import evaluate_tiny_scenes, tiny_scenes_importance
from recipes.measurement import weights_sha256

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "results" / "tiny-scenes.md").read_text(encoding="utf-8")
FOLDER = EMBEDDED["tiny-scenes"]
CARD = (FOLDER / "README.md").read_text(encoding="utf-8")


def measured(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"tiny_scenes_{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["evaluation", "importance"])
def test_results_belong_to_the_shipped_weights(name):
    assert measured(name)["weights_sha256"] == weights_sha256("tiny-scenes"), "measure again: the weights have changed"


def test_the_page_shows_the_tables_that_the_commands_print():
    assert evaluate_tiny_scenes.table(measured("evaluation")) in PAGE
    assert tiny_scenes_importance.table(measured("importance")) in PAGE


def test_the_card_shows_the_scores_of_the_network():
    rows = evaluate_tiny_scenes.table(measured("evaluation")).splitlines()[2:]
    own = [row for row in rows if f"| {evaluate_tiny_scenes.NETWORK} |" in row]
    assert len(own) == len(evaluate_tiny_scenes.RANGES)
    assert all(row in CARD for row in own)
    assert "Apache-2.0" in CARD


def test_the_model_is_small_enough_to_ship():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 16e6
