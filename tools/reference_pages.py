"""Fill the reference pages while mkdocs builds: the public names of the package, and the commands with their options.

Both lists come from the package itself, so a name or an option that is added, moved or renamed needs no edit here.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import typer

import pullback
from pullback.cli import app


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the two markers; mkdocs calls this for every page."""
    return markdown.replace("<!-- public names -->", public_names()).replace("<!-- commands -->", commands())


def public_names() -> str:
    """One section per room, each public name as a directive for mkdocstrings."""
    rooms: dict[str, list[str]] = defaultdict(list)
    for name in pullback.__all__:
        value = getattr(pullback, name)
        module = getattr(value, "__module__", None)
        if module is not None and module.startswith("pullback"):
            rooms[module.split(".")[1]].append(f"::: {module}.{value.__qualname__}")
    parts = []
    for room in sorted(rooms):
        parts += [f"## {room}", *sorted(rooms[room])]
    return "\n\n".join(parts)


def commands() -> str:
    root = typer.main.get_command(app)
    return "\n\n".join(
        part for name in sorted(root.commands) for part in section(f"pullback {name}", root.commands[name])
    )


def section(name: str, command: Any) -> list[str]:
    """A heading, what the command does, and a table of its arguments and options; sections of its subcommands "
    "follow."""
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
