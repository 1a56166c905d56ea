"""The command line. Nothing heavy is imported before a command runs, so that `--help` is instant."""

from __future__ import annotations

from typing import Annotated

import typer

from pullback import __version__
from pullback.cli.demo import demo
from pullback.cli.diagnose import diagnose
from pullback.cli.index import index
from pullback.cli.look import look
from pullback.cli.ls import ls
from pullback.cli.pareto import pareto
from pullback.cli.plan import plan
from pullback.cli.prune import prune
from pullback.cli.report import report
from pullback.cli.reproduce import reproduce
from pullback.cli.search import search
from pullback.cli.targets import targets
from pullback.cli.train import train
from pullback.cli.tune import tune

app = typer.Typer(
    name="pullback",
    help="The task-induced geometry of vision-transformer features.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (diagnose, demo, look, ls, pareto, plan, prune, report, reproduce, search, targets, tune):
    app.command()(command)
app.add_typer(index)
app.add_typer(train)


def main() -> None:
    """Run the `pullback` script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pullback {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass
