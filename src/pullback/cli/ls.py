"""`pullback ls`: everything that can be chosen by name, as the registry has it."""

from __future__ import annotations

from pullback import registry
from pullback.cli.common import reported, say
from pullback.report.console import console, decoders_table, models_table, scores_table
from pullback.report.progress import ProgressDisplay


def ls() -> None:
    """List the models that can be loaded, the decoders that fit them, and the scores that tokens are pruned by."""
    with ProgressDisplay(console(stderr=True)) as progress, reported(progress):
        registry.load_plugins()
    screen = console()
    screen.print(models_table(registry.BACKBONES.values()))
    screen.print(decoders_table(registry.DECODERS))
    screen.print(scores_table(registry.SCORES.values()))
    say(
        "`tiny-scenes` and `tiny-views` (a vggt) come with the package. A folder with config.json and safetensors of "
        "one of these types works like its hub id. Samples of vggt are scenes of several views, which only "
        "`pullback diagnose` and Python take.",
        "dim",
    )
