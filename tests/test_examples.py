"""The notebooks in `examples/` run from top to bottom, and each cell shows what a notebook would show."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pullback[plot])")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    stored = json.loads(notebook.read_text(encoding="utf-8"))
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    return [cell for cell in stored["cells"] if cell["cell_type"] == kind]


def run(source: str, namespace: dict[str, Any]) -> object:
    """Run a cell as a notebook does, and return the value of its last line where that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)


def shown(value: object) -> str:
    """What a notebook would show: "html", "picture", "figure" or "text"."""
    if isinstance(value, Image.Image):
        return "picture"
    if hasattr(value, "savefig"):  # some versions of matplotlib give figures a _repr_html_ that returns None
        return "figure"
    if (html := getattr(value, "_repr_html_", None)) is not None:
        assert "<div" in html()
        return "html"
    assert len(repr(value)) < 300
    return "text"


def test_there_are_notebooks():
    assert [notebook.name for notebook in NOTEBOOKS] == ["first_contact.ipynb"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_cleared_and_cells_have_their_own_names(notebook):
    code = cells(notebook, "code")
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    names = [cell["id"] for cell in code + cells(notebook, "markdown")]
    assert len(set(names)) == len(names) and notebook.stat().st_size < 20_000


def test_the_first_contact_shows_pictures_and_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    kinds = []
    for cell in cells(EXAMPLES / "first_contact.ipynb", "code"):
        value = run("".join(cell["source"]), namespace)
        kinds.append(shown(value))
    assert kinds == ["html", "text", "picture", "html", "picture", "html", "figure"]
    assert not list(tmp_path.iterdir()), "nothing is left behind"
