"""`make bench` knows every benchmark."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
spec = importlib.util.spec_from_file_location("quick_benchmarks", FOLDER / "quick.py")
quick = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quick)


def test_every_script_has_a_short_version():
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"measure", "quick", "attention_kernels"}
    assert set(quick.QUICK) == scripts and set(quick.FULL) <= scripts


def test_folders_take_the_place_of_capital_words():
    assert quick.filled("6=HEAD", {"HEAD": "/tmp/head"}) == "6=/tmp/head"
    assert quick.filled("OUT/heads", {"OUT": "/tmp/out", "PHOTOS": "/tmp/photos"}) == "/tmp/out/heads"


def test_an_unknown_benchmark_is_refused_with_the_names(monkeypatch):
    monkeypatch.setattr("sys.argv", ["quick.py", "nothing"])
    with pytest.raises(SystemExit, match="no benchmark 'nothing'; there are products, accuracy"):
        quick.main()
