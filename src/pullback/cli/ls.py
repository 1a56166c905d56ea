"""`pullback ls`: everything that can be chosen by name, as the registry has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from pullback import models, registry
from pullback.cli.common import reported, say
from pullback.errors import PullbackError
from pullback.report.console import console, decoders_table, models_table, scores_table, shipped_table
from pullback.report.experiments_console import experiments_table
from pullback.report.progress import ProgressDisplay
from pullback.runs.documents import layer_name


def ls(
    what: Annotated[
        str | None, typer.Argument(help="experiments: the tables and figures that `pullback reproduce` measures.")
    ] = None,
) -> None:
    """List the models that can be loaded, the decoders that fit them, and the scores that tokens are pruned by."""
    if what is not None:
        _list_experiments(what)
        return
    with ProgressDisplay(console(stderr=True)) as progress, reported(progress):
        registry.load_plugins()
    screen = console()
    screen.print(models_table(registry.BACKBONES.values()))
    screen.print(decoders_table(registry.DECODERS))
    screen.print(scores_table(registry.SCORES.values()))
    screen.print(shipped_table(_shipped()))
    say(
        "`tiny-scenes` and `tiny-views` (a vggt) come with the package. A folder with config.json and safetensors of "
        "one of these types works like its hub id. Samples of vggt are scenes of several views, which only "
        "`pullback diagnose` and Python take.",
        "dim",
    )


def _list_experiments(what: str) -> None:
    with ProgressDisplay(console(stderr=True)) as progress, reported(progress):
        if what != "experiments":
            raise PullbackError(f"what: expected experiments, or nothing, got {what!r}.")
        progress.stage("loading torch")
        from pullback.experiments.registry import EXPERIMENTS, experiment

        found = [experiment(name) for name in EXPERIMENTS]
    console().print(experiments_table((own.name, own.title, own.paper_label) for own in found))
    say("`pullback reproduce NAME --out DIR` measures one of them, `all` all of them.", "dim")


def _shipped() -> Iterator[tuple[str, str, str]]:
    """Yield (name, what it is, layers by decoder) of all that comes with the package; heads of one model together."""
    heads: dict[str, dict[str, list[str]]] = {}
    for folder, config in models.configurations().items():
        if folder.parent == models.WEIGHTS:
            yield folder.name, str(config.get("kind", "a model")), ""
            continue
        origin = config["origin"]
        layers = heads.setdefault(folder.parent.name, {}).setdefault(origin["decoder"], [])
        layers.append(layer_name(origin["layer"]))
    for name, decoders in heads.items():
        yield name, "importance-head", "; ".join(f"{own} {', '.join(layers)}" for own, layers in decoders.items())
