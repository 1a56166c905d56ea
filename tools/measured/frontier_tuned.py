"""Frozen and tuned models at the same budgets: goals, rivals tuned in the same way, other seeds, nearest
neighbours, other models and sizes. The files are those of `benchmarks/frontier.py report`."""

from __future__ import annotations

import statistics
from typing import Any

from .common import digits, joined, listed, p_value, read, said, source, table
from .frontier import setting, with_interval

HELD_OUT, SEEDS = "frontier_dinov2_heldout_cuda.json", "frontier_dinov2_heldout-seeds_cuda.json"
SKETCH = "frontier_dinov2_sketch_cuda.json"
CLIP, CLIP_SKETCH = "frontier_clip_heldout_cuda.json", "frontier_clip_sketch_cuda.json"
HIRES = "frontier_hires_hires_cuda.json"
NEIGHBOURS = "frontier_dinov2_neighbours_cuda.json"
DENSE, DENSE_CHOSEN = "frontier_saliency_heldout_cuda.json", "frontier_saliency_chosen_cuda.json"

ASKED: dict[bool, dict[float, float]] = {
    False: {0.76: 0.75, 0.715: 1.4, 0.61: 3.3},
    True: {0.715: 0.55, 0.65: 1.3, 0.61: 1.7, 0.54: 2.8},
}
"""The most that the error of the class embedding should be within so many operations, frozen and tuned."""
AGAINST: dict[bool, tuple[float, ...]] = {False: (0.60, 0.50), True: (0.70, 0.50, 0.35)}
"""Where it should be below that of every rival."""
STATE = {False: "frozen", True: "tuned"}
MOST_LOST = 0.5  # points of accuracy at 0.70

Entry = dict[str, Any]


def contest(document: Entry, budget: float, tuned: bool) -> Entry | None:
    """Return our point for a budget with what it was compared with; None where none was made."""
    return next((c for c in document["contests"] if c["budget"] == budget and c["tuned"] == tuned), None)


def strongest(found: Entry) -> Entry:
    rival: Entry = min(found["against"], key=lambda entry: entry["mean"])
    return rival


def plan_of(document: Entry, found: Entry) -> Entry:
    return next(point for point in document["points"] if point["point"] == found["point"])


def goals() -> str:
    """The goals, and what our point for that budget reaches; where none was measured, that is said."""
    document = read(HELD_OUT)
    rows: list[list[str]] = []
    reached: list[str] = []
    missed: list[str] = []
    open_: list[str] = []
    for tuned in (False, True):
        wanted: list[tuple[float, float | None]] = [
            *ASKED[tuned].items(),
            *((budget, None) for budget in AGAINST[tuned]),
        ]
        for budget, limit in wanted:
            name, found = f"{budget:g} {STATE[tuned]}", contest(document, budget, tuned)
            if found is None:
                open_.append(name)
                continue
            rival = None if limit is not None else strongest(found)
            aim = f"at most {limit:g}" if rival is None else f"below {digits(rival['mean'])}, {rival['method']}"
            low, high = found["interval"]
            if rival is None:
                assert limit is not None
                met = found["mean"] <= limit
                firm = high <= limit if met else low > limit
            else:
                met = rival["difference"] < 0
                low, high = rival["interval of it"]
                firm = high < 0 if met else low > 0
            verdict = ("yes" if met else "no") + ("" if firm else ", within the noise")
            rows.append(
                [f"{budget:g}", STATE[tuned], setting(plan_of(document, found)), with_interval(found), aim, verdict]
            )
            (reached if met else missed).append(name)
    lines = [said(bool(reached), f"Reached: {listed(reached)}.")] if reached else []
    lines += [said(bool(missed), f"Not reached: {listed(missed)}.")] if missed else []
    lines += [said(bool(open_), f"Not measured: {listed(open_)}.")] if open_ else []
    header = ["operations", "", "what it does", "error [95 % interval]", "goal", "reached"]
    return joined(table(header, rows), source(HELD_OUT), lines)


def comparison(name: str, what: str) -> str:
    """Frozen and tuned errors of every method at every budget at which a rival was tuned, and who is ahead."""
    document = read(name)
    budgets = [budget for budget in document["budgets"] if _tuned_rivals(document, budget)]
    means: dict[str, dict[tuple[float, bool], float]] = {}
    for budget in budgets:
        for tuned in (False, True):
            found = contest(document, budget, tuned)
            for entry in [] if found is None else [{**found, "method": "**ours**"}, *found["against"]]:
                means.setdefault(entry["method"], {})[budget, tuned] = entry["mean"]
    rows = []
    for method, own in means.items():
        cells = []
        for budget in budgets:
            pair = [_cell(means, own, budget, tuned) for tuned in (False, True)]
            cells.append(" → ".join(one or "–" for one in pair) if any(pair) else "–")
        rows.append([method, *cells])
    header = ["operations, at most", *(f"{budget:g}" for budget in budgets)]
    return joined(
        f"**{what}**, {document['images_compared']} images, frozen → tuned.",
        table(header, rows),
        source(name),
        [recipe(document), *verdicts(document, budgets)],
    )


def _tuned_rivals(document: Entry, budget: float) -> bool:
    found = contest(document, budget, True)
    return found is not None and any(
        entry["point"].startswith(f"{entry['method']} {budget:g} ") for entry in found["against"]
    )


def _cell(
    means: dict[str, dict[tuple[float, bool], float]], own: dict[tuple[float, bool], float], budget: float, tuned: bool
) -> str:
    if (budget, tuned) not in own:
        return ""
    least = min(other[budget, tuned] for other in means.values() if (budget, tuned) in other)
    number = digits(own[budget, tuned])
    return f"**{number}**" if own[budget, tuned] == least else number


def recipe(document: Entry) -> str:
    """Say on what, and for how long, all were tuned; the file must have it the same for all."""
    records = document["tuning"].values()
    same = {(record["images"], record["held_out_images"], record["steps"], record["size"][0]) for record in records}
    images, held_out, steps, side = min(same)
    what = f"{images:,} photographs, {held_out:,} others that judged, {steps} steps, crops of {side} pixels"
    return said(len(same) == 1, f"All were tuned alike: {what}.")


def verdicts(document: Entry, budgets: list[float]) -> list[str]:
    """Say where ours is ahead of the best rival, behind it, or neither."""
    lines = []
    for tuned in (False, True):
        told: dict[str, list[str]] = {"ahead of": [], "not to be told from": [], "**behind**": []}
        for budget in budgets:
            found = contest(document, budget, tuned)
            if found is None or not found["against"]:
                continue
            rival = strongest(found)
            low, high = rival["interval of it"]
            word = "ahead of" if high < 0 else "**behind**" if low > 0 else "not to be told from"
            share = found["mean"] / rival["mean"]
            told[word].append(f"{budget:g} ({share:.2f} of {rival['method']}, p = {p_value(rival['p'])})")
        lines += [
            f"- {STATE[tuned].capitalize()}, ours is {word} the best rival at {listed(places)}."
            for word, places in told.items()
            if places
        ]
    return lines


def seeds() -> str:
    """The same with other seeds of the tuning: each method's error at the first budget."""
    first, others = read(HELD_OUT), read(SEEDS)
    found: dict[str, dict[str, Entry]] = {}
    for document in (first, others):
        for point in document["points"]:
            method, separator, seed = point["point"].rpartition(" seed ")
            if separator:
                found.setdefault(method, {})[seed] = point
    columns = sorted({seed for own in found.values() for seed in own})
    rows = []
    for method, own in sorted(found.items()):
        if set(own) == set(columns):
            means = [own[seed]["mean"] for seed in columns]
            spread = f"{digits(statistics.mean(means))} ± {digits(statistics.stdev(means), 2)}"
            rows.append([method, *(digits(mean) for mean in means), spread])
    header = ["tuned", *(f"seed {seed}" for seed in columns), "mean ± standard deviation"]
    return joined(table(header, rows), source(HELD_OUT, SEEDS))


def neighbours() -> str:
    """Leave-one-out accuracy in folds, and what it is more than that of the unpruned model."""
    document = read(NEIGHBOURS)
    rows, lines = [], [f"- Tuned on three folds at a time, for {document['machine']['steps']} steps."]
    for row in document["rows"]:
        if row["k"] != 10:
            continue
        wide = next(other for other in document["rows"] if other["name"] == row["name"] and other["k"] == 20)
        cells = [f"{100 * row['accuracy']:.1f}"]
        for one in (row, wide):
            low, high = one["more interval"]
            unpruned = one["name"] == "unpruned"
            cells += ["–", "–"] if unpruned else [_points(one["more"], low, high), p_value(one["p_value"])]
        rows.append([row["name"], *cells])
        if row["name"] == "planned 0.7 tuned":
            low, _ = row["more interval"]
            kept = 100 * row["more"] >= -MOST_LOST
            firm = "" if kept == (100 * low >= -MOST_LOST) else ", though the interval reaches beyond"
            what = "at most" if kept else "**more than**"
            lines.append(f"- Tuned at 0.7 of the operations it loses {what} {MOST_LOST:g} points{firm}.")
    header = ["", "accuracy, %", "more than unpruned, k = 10", "McNemar p", "k = 20", "p"]
    return joined(table(header, rows), source(NEIGHBOURS), lines)


def _points(more: float, low: float, high: float) -> str:
    return f"{100 * more:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]".replace("-", "−")


def dense() -> str:
    """The saliency decoder with learned heads: trust is chosen on training pictures, rivals on these very ones."""
    document, chosen = read(DENSE), read(DENSE_CHOSEN)
    budgets = document["budgets"]

    def curve(source_: Entry, method: str) -> list[Entry | None]:
        own = [point for point in source_["points"] if point["method"] == method]
        within = [[point for point in own if point["operations"] <= budget] for budget in budgets]
        return [min(some, key=lambda point: point["mean"], default=None) for some in within]

    ours = sorted({point["method"] for point in document["points"] if point["ours"]})
    common = [place for place in range(len(budgets)) if all(curve(chosen, method)[place] for method in ours)]
    totals = {method: sum((curve(chosen, method)[place] or {})["mean"] for place in common) for method in ours}
    best = min(totals, key=lambda method: totals[method])
    picked = [
        None if point is None else next(p for p in document["points"] if p["point"] == point["point"])
        for point in curve(chosen, best)
    ]
    lines: dict[str, list[Entry | None]] = {f"**{best}**": picked}
    for method in dict.fromkeys(point["method"] for point in document["points"] if not point["ours"]):
        lines[method] = curve(document, method)
    rows = []
    for name, points in lines.items():
        cells = []
        for place, point in enumerate(points):
            there = [other[place] for other in lines.values()]
            least = min((other["mean"] for other in there if other is not None), default=None)
            number = "–" if point is None else digits(point["mean"])
            cells.append(f"**{number}**" if point is not None and point["mean"] == least else number)
        rows.append([name, *cells])
    rivals = {
        place: [own[place] for name, own in lines.items() if "**" not in name and own[place]]
        for place in range(len(budgets))
    }
    ahead = [
        f"{budgets[place]:g}"
        for place, point in enumerate(picked)
        if point is not None and all(point["mean"] < rival["mean"] for rival in rivals[place] if rival)
    ]
    behind = [f"{budget:g}" for budget in budgets if f"{budget:g}" not in ahead]
    said_lines = [f"- Best at {listed(ahead)} of the operations."] if ahead else []
    said_lines += (
        [f"- **A rival is better, or none of ours is within the budget,** at {listed(behind)}."] if behind else []
    )
    values = sorted(float(method.rpartition(" ")[2]) for method in ours)
    trusts = ", ".join(f"{value:g}" for value in values)
    said_lines.append(
        f"- Trust and the point for each budget were chosen on {chosen['images_compared']} training photographs, trust "
        f"out of {trusts}; rivals count by their best point on the pictures that measure."
    )
    header = ["operations, at most", *(f"{budget:g}" for budget in budgets)]
    what = (
        f"**Saliency decoder on DINOv2-S, 224 px, 100 · |a − b| / |b|**, {document['images_compared']} images, frozen."
    )
    return joined(what, table(header, rows), source(DENSE, DENSE_CHOSEN), said_lines)


def cls() -> str:
    return comparison(HELD_OUT, "DINOv2-S class embedding, 224 px, 100 · (1 − cos)")


def sketch() -> str:
    return comparison(SKETCH, "The same on sketches")


def clip() -> str:
    return comparison(CLIP, "CLIP ViT-B/16, projected embedding, 224 px, 100 · (1 − cos)")


def clip_sketch() -> str:
    return comparison(CLIP_SKETCH, "CLIP on sketches")


def hires() -> str:
    return comparison(HIRES, "DINOv2-S class embedding, 518 px")


BLOCKS = {
    "tuned-goals": goals,
    "tuned-cls": cls,
    "tuned-sketch": sketch,
    "tuned-seeds": seeds,
    "tuned-neighbours": neighbours,
    "tuned-clip": clip,
    "tuned-clip-sketch": clip_sketch,
    "tuned-hires": hires,
    "dense-saliency": dense,
}
