"""The wheel holds everything that the package needs, and works from there: no source tree, no network."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pullback import models

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = "pullback/models/weights"


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: a build leaves files behind, and old ones of the checkout must not slip in."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "-q")
    run(sys.executable, "-m", "pip", "wheel", *offline, "-w", folder / "dist", ".", cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_all_weights_their_cards_and_the_type_marker(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = ("config.json", "model.safetensors", "README.md")
    folders = {path.relative_to(models.WEIGHTS).as_posix() for path in models.configurations()}
    assert folders >= set(models.EMBEDDED)
    wanted = {f"{WEIGHTS}/{folder}/{file}" for folder in folders for file in files}
    wanted |= {f"{WEIGHTS}/{path.name}/README.md" for path in models.WEIGHTS.iterdir() if path.is_dir()}
    assert wanted | {"pullback/py.typed"} <= names
    for kind in ("*.py", "*.j2"):
        sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "pullback").rglob(kind)}
        assert sources and sources <= names
    assert all(name.startswith(("pullback/", "pullback-")) for name in names)


def test_the_package_works_from_the_wheel_without_network(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:  # all that installing a pure wheel without scripts is
        archive.extractall(site)
    program = f"""
import runpy, sys
sys.path.insert(0, {str(site)!r})  # before the checkout, which the environment points to
runpy.run_path({str(ROOT / "tests" / "helpers" / "offline_diagnosis.py")!r}, run_name="__main__")
"""
    assert f"from {site}" in run(sys.executable, "-I", "-c", program, cwd=empty)
