"""Copy what `pullback reproduce` left in a folder to where it can be published: without photographs, and small.

    PYTHONPATH=src python tools/publish_results.py FROM docs/results/paper-small
    PYTHONPATH=src python -m pullback report docs/results/paper-small --pictures

Rows and verdicts are copied as they are, so that the same `pullback reproduce` goes on from the copy; of folders only
the names are published, and what experiments share (store/) stays behind. Photographs are not ours to publish: plain
grey stands in the place of every picture of which the code does not say that it is a scene that we drew, and the figure
says so. Figures keep their first pictures.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pullback.errors import PullbackError
from pullback.experiments import maps, overview
from pullback.experiments.scales import DATA, DRAWN, MODELS, SCALES, Scale
from pullback.runs.documents import EXPERIMENT, REPRODUCE, ROWS, TIMES
from pullback.runs.files import make_folder, read_arrays, read_json, write_arrays, write_json
from pullback.runs.settings import ELSEWHERE

SHOWN = 4
"""How many pictures of a figure are published."""
GREY = 128
WITHHELD = "Photographs are not ours to publish: plain grey stands in their place."
_PICTURES_ALONG = {"pictures": 0, "before": 0, "after": 0, "captions": 0, "maps": 1, "rho": 1, "nearest": 1}
"""Along which axis of an array its pictures are."""


def publish(source: Path, target: Path) -> list[str]:
    """Copy the files of every experiment, in place of what ``target`` held of it; return the figures whose pictures
    were withheld."""
    settings = read_json(source / REPRODUCE)
    scale = scale_of_run(settings)
    write_json(make_folder(target) / REPRODUCE, without_places(settings))
    withheld = []
    for folder in sorted({path.parent for name in (ROWS, TIMES) for path in source.glob(f"*/{name}")}):
        own = make_folder(target / folder.name)
        for name in (ROWS, TIMES, EXPERIMENT):
            (own / name).unlink(missing_ok=True)
            if (folder / name).is_file():
                shutil.copyfile(folder / name, own / name)
        shutil.rmtree(own / "arrays", ignore_errors=True)
        for path in sorted(folder.glob("arrays/*.npz")):
            data = data_of(scale, folder.name, path.stem)
            arrays = publishable(read_arrays(path), drawn=data in DRAWN)
            write_arrays(make_folder(own / "arrays") / path.name, arrays)
            withheld += [f"{folder.name}/{path.stem}"] if "withheld" in arrays else []
    return withheld


def scale_of_run(settings: Mapping[str, Any]) -> Scale:
    """The scale of a run, from its reproduce.json; its models and pictures need not be here."""
    models, data = ({role: settings[role] for role in roles if settings.get(role)} for roles in (MODELS, DATA))
    return replace(SCALES[settings["scale"]], models=models, data=data, seed=settings["seed"])


def without_places(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the paths of this machine: of a folder only its name is published."""
    given = {role: Path(settings.get(role) or "").expanduser() for role in (*MODELS, *DATA)}
    return {**settings, **{role: ELSEWHERE + place.name for role, place in given.items() if place.is_absolute()}}


def data_of(scale: Scale, experiment: str, figure: str) -> str | None:
    """The role of the pictures of a figure, such as "photos" or "scenes"; None where nothing says it."""
    if experiment == maps.IMPORTANCE_MAPS.name:
        return {maps.figure_of(own): own.data for own in maps.SUBJECTS}.get(figure)
    return overview.front(scale).data if experiment == overview.OVERVIEW.name else None


def publishable(arrays: Mapping[str, np.ndarray], *, drawn: bool) -> dict[str, np.ndarray]:
    """Cut the arrays of a figure to its first pictures, and make those grey that are not known to be drawn. Arrays
    without pictures stay as they are."""
    if "pictures" not in arrays:
        return dict(arrays)
    found = {
        name: array.take(range(min(SHOWN, array.shape[axis])), axis) if axis is not None else array
        for name, array in arrays.items()
        for axis in (_PICTURES_ALONG.get(name),)
    }
    for name in ("before", "after"):  # maps of an output, as large as the picture
        if name in found:
            if np.abs(found[name]).max() > np.finfo(np.float16).max:
                raise PullbackError(f"figure: {name} has values beyond float16, which the published copy cannot hold.")
            found[name] = found[name].astype(np.float16)
    if not drawn:
        found["pictures"] = np.full_like(found["pictures"], GREY)
        found["withheld"] = np.array(WITHHELD)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="FROM")
    parser.add_argument("target", type=Path, metavar="TO")
    given = parser.parse_args()
    if given.source.resolve() == given.target.resolve():
        sys.exit("error: TO is FROM, whose photographs would be lost. Name another folder.")
    try:
        withheld = publish(given.source, given.target)
    except PullbackError as error:
        sys.exit(f"error: {error}")
    print(f"written to {given.target}; without their photographs: {', '.join(withheld) or 'none'}")


if __name__ == "__main__":
    main()
