"""Read the committed result files and write Markdown: tables, source lines, and sentences that are checked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
UNCOMMITTED = "**Made from an uncommitted tree.**"
NOTED = {
    "camera_metric_tiny_views_cpu.jsonl": ("a CPU, 1 thread", "2026-11-16"),
    "camera_metric_tiny_views_rank4_cpu.jsonl": ("a CPU, 1 thread", "2026-11-16"),
    "camera_spn_tiny_views_cuda.json": ("NVIDIA H200", "2026-11-16"),
    "head_ablations_cpu.jsonl": ("a CPU, 1 thread", "2026-11-15"),
    "head_dinov2s_cls_L10_cpu.jsonl": ("a CPU", "2026-11-15"),
    "head_dinov2s_cls_L10_refined_cpu.jsonl": ("a CPU", "2026-11-15"),
    "pruning_bound.jsonl": ("a CPU, 2 cores", "2026-11-15 and 16"),
    "scene_taxonomy_tiny_views_cuda.jsonl": ("NVIDIA H200", "2026-11-16"),
    "tiny_scenes_training.jsonl": ("NVIDIA H200", "2026-11-15"),
    "tiny_views_training.jsonl": ("NVIDIA H200", "2026-11-16"),
}
"""Machine and date of files that store neither, as noted in the commit that added them."""


class WrongClaim(Exception):
    """A sentence of a results page that its result file contradicts."""


def read(name: str) -> Any:
    """Return the content of a result file: one document (.json), a list of rows (.jsonl) or plain text (.txt)."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text) if name.endswith(".json") else text


def said(holds: bool, sentence: str) -> str:
    """Return the sentence as a list item if the measurement supports it, or stop the generator."""
    if not holds:
        raise WrongClaim(f"the result files no longer say: {sentence}")
    return f"- {sentence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells and the header {len(header)}: {row}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def joined(*parts: str | list[str]) -> str:
    """Put the parts of a block under one another; a list of sentences becomes one list."""
    return "\n\n".join("\n".join(part) if isinstance(part, list) else part for part in parts)


def source(*names: str) -> str:
    """Return the line under a table: each file with its machine, precision, date and commit, as far as it says them."""
    return "*" + "; ".join(f"`{name}` ({provenance(name)})" for name in names) + "*"


def provenance(name: str) -> str:
    return in_words(facts(name))


def in_words(found: dict[str, str]) -> str:
    """Write what `facts` or `facts_of` found, as far as it is known."""
    return ", ".join(found[key] for key in ("machine", "precision", "date", "commit") if found[key])


def facts(name: str) -> dict[str, str]:
    """Return machine, precision, date and commit of a result file; no precision or commit where it does not say."""
    if name in NOTED:
        machine, date = NOTED[name]
        return {"machine": machine, "precision": "", "date": date, "commit": ""}
    if name.endswith(".txt"):  # a log that was kept: its first line begins with machine, versions and date
        first = read(name).partition(". ")[0].split(", ")
        return {"machine": first[0], "precision": "", "date": first[-1], "commit": ""}
    content = read(name)
    return facts_of(content[0] if isinstance(content, list) else content, name)


def facts_of(content: dict[str, Any], name: str) -> dict[str, str]:
    """Return what a document, or a part of one, says of its origin. ``name``: its name in an error."""
    stored = content.get("machine", content)  # a name, or a dictionary with the device
    machine = stored if isinstance(stored, str) else stored.get("device", "")
    threads = "" if isinstance(stored, str) or "H200" in machine else stored.get("threads", "")
    if machine and threads:
        machine += f", {threads} thread{'s' * (int(threads) > 1)}"
    both = {**content, **(stored if isinstance(stored, dict) else {})}
    date, commit = content.get("date", both.get("date", ""))[:10], both.get("commit") or ""
    if not machine or not date:
        raise ValueError(f"{name} says neither its machine nor its date: store them, or note them in NOTED")
    if commit:
        commit = f"commit {commit[:7]}" + (f". {UNCOMMITTED}" if commit.endswith("-dirty") else "")
    machine = "NVIDIA H200" if "H200" in machine else machine
    precision = content.get("precision", "").partition(" arithmetic")[0]
    return {"machine": machine, "precision": precision, "date": date, "commit": commit}


def digits(value: float, count: int = 3) -> str:
    """Write a number with so many significant digits and without an exponent: 0.0083, 1.50, 24.0."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{count - 1}e}")
    places = max(0, count - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{places}f}"


def power(value: float) -> str:
    """Write a small number with two digits and an exponent: 2.4e-3."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def pm(found: dict[str, float], places: int, scale: float = 1.0) -> str:
    return f"{scale * found['mean']:.{places}f} ± {scale * found['se']:.{places}f}"


def signed(value: float, error: float, places: int) -> str:
    """Write a difference with its sign and error: +0.0134 ± 0.0013, −0.745 ± 0.008; 0 where both vanish."""
    both = f"{value:+.{places}f} ± {error:.{places}f}"
    return "0" if not both.strip("+-0. ±") else both.replace("-", "−")


def span(values: Iterable[float], places: int = 2) -> str:
    """Write the range of some values: 0.07 to 0.10, or 0.07 where both ends look alike."""
    values = list(values)
    low, high = f"{min(values):,.{places}f}", f"{max(values):,.{places}f}"
    return low if low == high else f"{low} to {high}"


def listed(names: Sequence[str]) -> str:
    """Write names one after the other: a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def p_value(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-3 else power(value).replace(".0e", "e")
