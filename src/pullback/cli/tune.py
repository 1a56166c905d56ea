"""`pullback tune`: the vectors of a pruned model, trained without labels to give the unpruned output back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pullback.cli import options
from pullback.cli.common import parse_held_out, parse_size, running, say, say_written
from pullback.errors import FileError, counted, naming
from pullback.report.drawing import Drawing
from pullback.runs.documents import CHECKPOINT, MEASURES, METRICS, PRUNED


def tune(
    pruned: Annotated[Path, typer.Argument(help="A pruned model: the folder of save_pretrained or `pullback plan`.")],
    images: options.Source,
    out: Annotated[Path, typer.Option(help="Folder for the tuned model, metrics.jsonl and the checkpoint.")],
    held_out: Annotated[
        str, typer.Option(help="Images that decide which vectors are kept, or the share of the images to hold out.")
    ] = "0.1",
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 700,
    batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 128,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 2e-3,
    positions: Annotated[bool, typer.Option("--positions", help="Tune the position embeddings, too.")] = False,
    match_hooks: Annotated[
        float, typer.Option(min=0.0, help="Weight of the layers that a dense decoder reads, beside its output.")
    ] = 0.0,
    size: options.Size = None,
    limit: options.Limit = None,
    validate_every: Annotated[int, typer.Option(min=1, help="Steps between validations and checkpoints.")] = 100,
    patience: Annotated[
        int | None,
        typer.Option(min=1, help="Stop after so many validations without a better score.", show_default="never"),
    ] = None,
    precision: Annotated[
        Literal["float32", "bf16"] | None,
        typer.Option(help="Of the products in training.", show_default="bf16 on a GPU, else float32"),
    ] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Tune biases, norms and layer scales of a pruned model on unlabelled images. The same command goes on."""
    with Drawing() as drawing, running(out, tune, [images]) as progress:
        from pullback.backbones.loading import resolve_device
        from pullback.pruning import PrunedModel
        from pullback.pruning.tune import tune as tuned_by

        pixels, judges = parse_size(size), parse_held_out(held_out)
        progress.stage(f"loading {pruned}")
        with naming("pruned", "folder"):
            model = PrunedModel.from_pretrained(pruned, device=resolve_device(device))
        try:
            found = tuned_by(
                model,
                images,
                held_out=judges,
                steps=steps,
                batch=batch,
                learning_rate=learning_rate,
                positions=positions,
                match_hooks=match_hooks,
                size=pixels,
                limit=limit,
                validate_every=validate_every,
                patience=patience,
                precision=precision,
                seed=seed,
                out=out,
                progress=progress,
            )
        except (KeyboardInterrupt, OSError) as error:
            damaged = isinstance(error, FileError) and "cannot be read" in str(error)
            if (out / CHECKPOINT).is_file() and not damaged:
                progress.done.append("the last checkpoint; the same command goes on from there")
                progress.current = None
            raise
        progress.stage(f"writing {out}")
        found.save_pretrained(out)
        progress.stage("drawing figures")
        figures = drawing.draw(out, page=False)
        assert found.tuned is not None
        record, numbers = found.tuned.record, sum(value.numel() for value in found.tuned.parameters())
    say(_sentence(record))
    say(f"{numbers:,} numbers tuned, the best after {record['best_step']:,} of {record['steps']:,} steps")
    say_written(out, ["the tuned model", PRUNED, METRICS], figures)
    say(f"to use it: pb.PrunedModel.from_pretrained({str(out)!r})")


def _sentence(record: dict[str, Any]) -> str:
    before, after = (_with_error(record, name) for name in ("before", "after"))
    images = counted(record["held_out_images"], "held-out image")
    return f"{MEASURES[record['measure']]}: {before} before, {after} after, on {images}"


def _with_error(record: dict[str, Any], name: str) -> str:
    several = record["held_out_images"] > 1
    return f"{record[name]:.3g}" + (f" ± {record[f'{name}_se']:.2g}" if several else "")
