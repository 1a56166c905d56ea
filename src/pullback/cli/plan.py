"""`pullback plan`: picture size, stages and shares for a budget, and what to expect of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pullback.cli import options
from pullback.cli.common import (
    PRUNE_VIEWS,
    parse_heads,
    parse_held_out,
    parse_size,
    refuse_scenes,
    running,
    say,
    say_written,
)
from pullback.errors import PullbackError, counted, naming
from pullback.registry import SCORES, check_former_score
from pullback.report.drawing import Drawing
from pullback.runs.documents import PLAN

_SCORES = ", ".join(name for name, entry in SCORES.items() if not entry.needs)


def plan(
    model: options.Model,
    images: Annotated[str, typer.Option(help="Calibration images: an image, a folder or a glob.")],
    heads: Annotated[
        str,
        typer.Option(
            help=f"Block = head of `pullback train head`, or a score's name (importance, {_SCORES}): "
            "3=heads/L03,6=heads/L06, or 4=norm. importance: heads that come with the package, by itself all of them."
        ),
    ] = "importance",
    flops: Annotated[
        float | None, typer.Option(help="Budget: share of the operations of the model's blocks, such as 0.75.")
    ] = None,
    milliseconds: Annotated[float | None, typer.Option(help="Budget: time of one batch on this machine.")] = None,
    degradation: Annotated[
        float | None, typer.Option(help="Budget: cosine distance x 100 of the embedding, SILog x 100 of depth.")
    ] = None,
    stages: Annotated[int, typer.Option(min=1, help="At most so many stages.")] = 2,
    sizes: Annotated[
        str,
        typer.Option(
            help="The picture's shorter sides to consider beside its own, such as 210,196; auto: down to half of it; "
            "own: no other."
        ),
    ] = "auto",
    output: Annotated[
        Literal["model", "cls"],
        typer.Option(help="cls: the last block computes the class token alone, for outputs that read nothing else."),
    ] = "model",
    tune: Annotated[
        str | None,
        typer.Option(help="Unlabelled images to tune the best plans on, as `pullback tune` does.", show_default="none"),
    ] = None,
    tune_best: Annotated[int, typer.Option(min=1, help="Tune so many plans, and take the best of them.")] = 3,
    tune_steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of each.")] = 700,
    tune_batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 128,
    tune_held_out: Annotated[
        str, typer.Option(help="Images that decide which vectors are kept, or the share of the images to hold out.")
    ] = "0.1",
    limit: Annotated[int, typer.Option(min=1, help="Use the first so many images.")] = 128,
    batch: options.Batch = 16,
    size: options.Size = None,
    device: options.Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Write the pruned model here, for pb.PrunedModel.from_pretrained.")
    ] = None,
) -> None:
    """Find a picture size, and which tokens to remove where, so that a budget of operations, time or error is met."""
    with Drawing() as drawing, running(out, plan, [images, *([] if tune is None else [tune])]) as progress:
        from pullback.learning.head import ImportanceHead
        from pullback.probes import load_probe
        from pullback.pruning.budget import TuneOptions, check_budget, plan_pruning, shipped_choices
        from pullback.pruning.planned import Asked, write_plan
        from pullback.pruning.scores import IMPORTANCE, score_names

        budget = {"flops": flops, "milliseconds": milliseconds, "degradation": degradation}
        refuse_scenes(model, "plan", *PRUNE_VIEWS)
        check_budget(**budget)
        named, pixels = None if heads == IMPORTANCE else parse_heads(heads), parse_size(size)
        considered = _sizes(sizes)
        options = None
        if tune is not None:
            judges = parse_held_out(tune_held_out)
            options = TuneOptions(tune, tune_best, judges, tune_steps, tune_batch)
        names = (IMPORTANCE, *score_names())
        with naming("heads"):
            for _, name in named or ():
                check_former_score("heads", name)
            scores: dict[int, Any] = {
                layer: name if name in names else ImportanceHead.from_pretrained(name) for layer, name in named or ()
            }
        progress.stage(f"loading {model}")
        probe = load_probe(model, "mean", device=device)
        network = probe.backbone.model
        if named is None:
            scores = dict(shipped_choices(probe.backbone))
            named = list(scores.items())
        for score in scores.values():
            if isinstance(score, ImportanceHead):
                score.to(probe.device)
        read = probe.read_images(images, pixels, limit=limit)
        pictures = read.pixels.to(probe.device)
        progress.stage("making plans")
        forecast = plan_pruning(
            network,
            scores,
            pictures,
            normalized=True,
            flops=flops,
            milliseconds=milliseconds,
            degradation=degradation,
            sizes=considered,
            stages=stages,
            output=output,
            tune=options,
            batch=batch,
            progress=progress,
        )
        tried = f"{counted(forecast.measured, 'plan')} tried on {counted(len(pictures), 'image')}"
        with progress.hidden():
            say(f"{forecast} ({tried})")
            for image in read.skipped:
                say(f"skipped {image}", "yellow")
        if out is not None:
            progress.stage(f"writing {out}")
            assert forecast.model is not None
            forecast.model.save_pretrained(out)
            asked = Asked(model, dict(named), budget, images=len(pictures), batch=batch)
            write_plan(out, forecast, asked, probe.device)
            progress.stage("drawing figures")
            figures = drawing.draw(out)
    if out is not None:
        say_written(out, ["the pruned model", PLAN], figures)


def _sizes(text: str) -> list[int] | None:
    """210,196 -> [210, 196], own -> [], auto -> None"""
    if text in ("auto", "own"):
        return None if text == "auto" else []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PullbackError(
            f"sizes: expected pixels by commas such as 210,196, or auto or own, got {text!r}."
        ) from None
