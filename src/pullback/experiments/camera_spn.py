"""The Spectral Pullback Network on the camera of scenes: the paper's controlled case, where J has 9 rows a view.

    python -m pullback.experiments.camera_spn --model runs/tiny-views/model --layer 4 --views 2 --train-scenes 1000 \
        --held-out 100 --steps 600 --batch 16 --device cuda --out spn.json

V_1 = |U^T V|_F^2 / r on held-out scenes (over all tokens, and over patch tokens alone) of the network before training,
of the best constant subspace, and of the network after equally many steps under each supervision, all from the same
weights; with the paired lead over the constant subspace, and the natural ratio sum_j |J u_j|^2 / |J|_F^2, which cannot
exceed kappa_cap. Networks are judged as the last step left them: no scene that judges them chose among their weights.
Scenes are drawn and their features computed once; neither the backbone nor the judges saw those that train.

The file is written after every row; the same command goes on with the rows that it does not hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from pullback.errors import PullbackError
from pullback.experiments.camera_networks import (
    CONSTANT,
    FROM_CONSTANT,
    SUPERVISIONS,
    UNTRAINED,
    CameraSpn,
    Row,
    Settings,
    camera_probe,
    supervision_of,
)
from pullback.learning.provenance import weights_hash
from pullback.report.console import console
from pullback.report.wording import UNKNOWN, plain


def run(
    model: str,
    settings: Settings,
    *,
    runs: Sequence[str] = SUPERVISIONS,
    device: str = "auto",
    out: Path | None = None,
) -> Iterator[Row]:
    """Row after row, old and new; with ``out``, from and to a JSON file that also holds settings and facts."""
    probe = camera_probe(model, settings, device)
    for name in runs:
        supervision_of(name.removesuffix(FROM_CONSTANT), probe, settings.precision)
    asked = {**asdict(settings), "weights": weights_hash(probe.backbone.model)}
    stored = {} if out is None else stored_result(out, asked)
    rows: list[Row] = stored.get("rows", [])
    known = {row["network"]: row for row in rows}
    experiment: CameraSpn | None = None
    for name in (CONSTANT, UNTRAINED, *runs):
        if name in known:
            yield known[name]
            continue
        if experiment is None:  # a file that holds every row needs no scenes
            experiment = CameraSpn(probe, settings)
        row = experiment.row(name)
        rows.append(row)
        if out is not None:
            save(out, {"settings": asked, "device": str(probe.device), **experiment.facts(), "rows": rows})
        yield row


def stored_result(path: Path, asked: Mapping[str, Any]) -> Row:
    """What the file holds, if it was made with these settings; nothing where there is none."""
    if not path.exists():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        settings = stored["settings"]
    except (ValueError, KeyError, TypeError):
        raise PullbackError(f"out: {path} is no result of this experiment. Choose another file.") from None
    changed = [name for name in sorted({*settings, *asked}) if settings.get(name) != asked.get(name)]
    if changed:
        raise PullbackError(
            f"out: {path} was made with other settings ({', '.join(changed)} differ). Choose another file, or the "
            "settings it was made with."
        )
    return stored


def save(path: Path, content: Row) -> None:
    """Written under another name first: a run that is killed leaves the last whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def table(rows: Sequence[Row]) -> Table:
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    titles = ("V_1", "lead", "V_1, patches", "lead", "natural ratio", "paper*")
    found.add_column("network", no_wrap=True)
    for title in titles:
        found.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = [text for name in ("v1", "v1_patches") for text in (plain(row[name]), _lead(row, name))]
        stated = plain(row["paper_v1_of_compressed_depth"])
        found.add_row(row["network"], *cells, plain(row["natural_ratio"]), stated)
    found.caption = "lead: over the constant subspace, 95 % interval.  *V_1 of VGGT's depth through a VAE"
    return found


def _lead(row: Row, name: str) -> str:
    if row["network"] == CONSTANT:
        return UNKNOWN
    half = row[f"{name}_lead_half_width"]
    return f"{row[f'{name}_lead']:+.3f}" + ("" if half is None else f" ± {half:.3f}")


_RUNS = "A supervision, or one with ' from constant'. Several times for several."


def main(
    model: Annotated[str, typer.Option(help="A VGGT: hub id, folder or .safetensors file.")],
    layer: Annotated[int | None, typer.Option(help="Of the aggregator.", show_default="the middle")] = None,
    views: Annotated[int, typer.Option(min=1, help="Of each scene.")] = 2,
    size: Annotated[int | None, typer.Option(help="Side of the views.", show_default="the model's own")] = None,
    decoder: Annotated[str, typer.Option(help="camera: of all views; camera-1: of one.")] = "camera",
    train_scenes: Annotated[int, typer.Option(min=1, help="Procedural scenes to learn from.")] = 1000,
    held_out: Annotated[int, typer.Option(min=1, help="Scenes that judge.")] = 100,
    rank: Annotated[int | None, typer.Option(help="Of the metric.", show_default="9 a view, at most 20")] = None,
    width: Annotated[int, typer.Option(min=4, help="Of the network.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = 600,
    batch: Annotated[int, typer.Option(min=1, help="Scenes per step.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="After warm-up.")] = 1e-3,
    runs: Annotated[list[str] | None, typer.Option(help=_RUNS, show_default="the three supervisions")] = None,
    precision: Annotated[str, typer.Option(help="Of the products: float32 or tf32.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of weights and sketches.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file; rows that it holds are kept.")] = None,
    device: Annotated[str, typer.Option(help="auto: the GPU where there is one.")] = "auto",
) -> None:
    """The Spectral Pullback Network on the camera of scenes."""
    try:
        settings = Settings(
            decoder=decoder,
            layer=layer,
            views=views,
            size=size,
            train_scenes=train_scenes,
            held_out=held_out,
            rank=rank,
            width=width,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            precision=precision,
            seed=seed,
        )
        rows: list[Row] = []
        for row in run(model, settings, runs=runs or SUPERVISIONS, device=device, out=out):
            rows.append(row)
            typer.echo(json.dumps(row), err=True)
        console().print(table(rows))
    except (PullbackError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
