"""Fill the reference page of the command line while mkdocs builds: every command with its options, as the app has them.

The pages of the Python names are filled by mkdocstrings; a test keeps every public name on one of them.
"""

from __future__ import annotations

from typing import Any

import typer

from pullback.cli import app


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marker; mkdocs calls this for every page."""
    return markdown.replace("<!-- commands -->", commands())


def commands() -> str:
    root = typer.main.get_command(app)
    return "\n\n".join(
        part for name in sorted(root.commands) for part in section(f"pullback {name}", root.commands[name])
    )


def section(name: str, command: Any) -> list[str]:
    """A heading, what the command does, and a table of its arguments and options; then the same of its subcommands."""
    parts = [f"## {name}", cell(command.help or "")]
    rows = [row for parameter in command.params if (row := option(parameter)) is not None]
    if rows:
        parts.append("\n".join(["| option | meaning | default |", "|---|---|---|", *rows]))
    for child, subcommand in sorted(getattr(command, "commands", {}).items()):
        parts += section(f"{name} {child}", subcommand)
    return parts


def option(parameter: Any) -> str | None:
    if parameter.name == "help":
        return None
    is_argument = parameter.param_type_name == "argument"
    name = (
        (parameter.metavar or parameter.name.upper()).strip("{}").upper() if is_argument else ", ".join(parameter.opts)
    )
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    empty = default is None or default is False or callable(default)
    shown = "required" if parameter.required else "" if empty else f"`{default}`"
    return f"| `{name}` | {cell(parameter.help or '')} | {shown} |"


def cell(text: str) -> str:
    """One line that Markdown does not take apart."""
    return " ".join(text.split()).replace("|", "\\|").replace("[/]", "").replace("\\[", "[")
