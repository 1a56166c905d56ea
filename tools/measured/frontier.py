"""Degradation against operations: ours, published rules and a smaller picture, frozen, at their best within budgets."""

from __future__ import annotations

from typing import Any

from .common import digits, joined, listed, p_value, read, said, source, table

PLANS = "frontier_plans_cpu.json"
HELD_OUT = "frontier_heldout_cpu.json"
SKETCH = "frontier_sketch_cpu.json"
DEPTH = "frontier_depth_cpu.json"
GOALS = {0.76: 0.75, 0.715: 1.4, 0.61: 3.3}
"""The most that the error of the class embedding should be within so many operations."""
AGAINST = (0.60, 0.50)
"""Where it should be below that of the best rival."""

Entry = dict[str, Any]


def best_within(document: dict[str, Any], budget: float, ours: bool) -> Entry | None:
    """Return the point with the least error within a budget. Of ours only plans count: what has many settings must not
    be chosen by the images that judge it."""
    wanted = [p for p in document["points"] if (p["method"] == "planned" if ours else not p["ours"])]
    within = [p for p in wanted if p["operations"] <= budget]
    return min(within, key=lambda point: point["mean"], default=None)


def test_at(document: dict[str, Any], budget: float) -> Entry:
    return next(test for test in document["tests"] if test["budget"] == budget and not test["tuned"])


def with_interval(point: Entry) -> str:
    low, high = point["interval"]
    return f"{digits(point['mean'])} [{digits(low)}, {digits(high)}]"


def setting(point: Entry) -> str:
    """Write what a point of ours does: "196 px, 8 % after block 3, 25 % after 6"."""
    plan = point["plan"]
    parts = [f"{plan['size']} px"] if plan.get("size") else []
    gone = [f"{100 * share:.3g} % after {stage}" for stage, share in zip(plan["stages"], plan["shares"], strict=True)]
    return ", ".join([*parts, *gone])


def rival_name(named: Entry) -> str:
    return named["point"] if named["method"] == "resize" else f"{named['method']}, {named['point']}"


def plans() -> str:
    """What the planner found on training pictures, and what it expected."""
    rows, beaten = [], []
    for plan in read(PLANS)["plans"]:
        low, high = plan["interval"]
        expected = f"{digits(plan['expected'])} [{digits(low)}, {digits(high)}]"
        cells = [f"{plan['budget']:g}", plan["plan"], expected, digits(plan["on the images that chose"])]
        rows.append([*cells, f"{plan['images'] // 2} + {plan['images'] // 2}"])
        beaten += [other["more"][1] > 0 for other in plan["alternatives"]]
    header = ["operations", "plan", "expected [95 % interval]", "on the half that chose", "images"]
    return joined(
        table(header, rows),
        source(PLANS),
        [said(all(beaten), "Each was expected to be ahead of every alternative that meets the budget there.")],
    )


def goals() -> str:
    """Ours at the budgets that were set as goals."""
    document = read(HELD_OUT)
    rows, reached, missed = [], [], []
    for budget, goal in GOALS.items():
        point = best_within(document, budget, ours=True)
        assert point is not None
        rows.append([f"{budget:g}", setting(point), with_interval(point), f"at most {goal:g}", _met(point, goal)])
        (reached if point["mean"] <= goal else missed).append(f"{budget:g}")
    for budget in AGAINST:
        point, test = best_within(document, budget, ours=True), test_at(document, budget)
        assert point is not None
        rival = best_within(document, budget, ours=False)
        assert rival is not None
        goal = f"below {digits(rival['mean'])}, {rival_name(rival)}"
        high = test["interval"][1]
        met = "yes" if high < 0 else "yes, within the noise" if test["difference"] < 0 else "no"
        rows.append([f"{budget:g}", setting(point), with_interval(point), goal, met])
        (reached if test["difference"] < 0 else missed).append(f"{budget:g}")
    lines = [said(bool(reached), f"Reached at {listed(reached)} of the operations.")] if reached else []
    lines += [said(bool(missed), f"Not reached at {listed(missed)}.")] if missed else []
    header = ["operations", "what it does", "error [95 % interval]", "goal", "reached"]
    return joined(table(header, rows), source(HELD_OUT), lines)


def _met(point: Entry, goal: float) -> str:
    low, high = point["interval"]
    if point["mean"] <= goal:
        return "yes" if high <= goal else "yes, the interval reaches beyond"
    return "no" if low > goal else "no, the interval reaches below"


def by_budget(document: dict[str, Any]) -> str:
    """One line per method and one column per budget; the least of each column is bold."""
    known = {(point["method"], point["point"]): point for point in document["points"]}
    lines = []
    for method in document["frontiers"]:
        name = f"**{method['method']}**" if method["ours"] else method["method"]
        points = [known.get((method["method"], point)) for point in method["budgets"]]
        lines.append((f"{name} ({method['points']})", points))
    columns = list(zip(*(points for _, points in lines), strict=True))
    least = [min((point["mean"] for point in column if point), default=None) for column in columns]
    rows = [
        [name, *("–" if p is None else _cell(p, p["mean"] == low) for p, low in zip(points, least, strict=True))]
        for name, points in lines
    ]
    return table(["operations, at most", *(f"{budget:g}" for budget in document["budgets"])], rows)


def _cell(point: Entry, bold: bool) -> str:
    number = digits(point["mean"])
    return f"**{number}**" if bold else number


def verdicts(document: dict[str, Any]) -> list[str]:
    """Say at which budgets ours is ahead of the best rival, behind it, or neither."""
    tests = [test for test in document["tests"] if not test["tuned"]]
    ahead = [test for test in tests if test["interval"][1] < 0]
    behind = [test for test in tests if test["interval"][0] > 0]
    neither = [test for test in tests if test not in ahead and test not in behind]
    lines = []
    if ahead:
        told = [
            f"{t['budget']:g} ({t['factor']:.2f} of {rival_name(t['rival'])}, p = {p_value(t['p_value'])})"
            for t in ahead
        ]
        lines.append(f"- Ours is ahead of the best rival at {listed(told)}.")
    if neither:
        told = [
            f"{t['budget']:g} ({t['factor']:.2f} of {rival_name(t['rival'])}, p = {p_value(t['p_value'])})"
            for t in neither
        ]
        lines.append(f"- The images do not tell them apart at {listed(told)}.")
    if behind:
        told = [
            f"{t['budget']:g} ({t['factor']:.2f} of {rival_name(t['rival'])}, p = {p_value(t['p_value'])})"
            for t in behind
        ]
        lines.append(f"- **A rival is ahead** at {listed(told)}.")
    return lines


def comparison(name: str, what: str) -> str:
    document = read(name)
    return joined(
        f"**{what}**, {document['images_compared']} images, frozen. In brackets the number of settings that were run.",
        by_budget(document),
        source(name),
        verdicts(document),
    )


def cls() -> str:
    return comparison(HELD_OUT, "DINOv2-S class embedding, 224 px, 100 · (1 − cos)")


def sketch() -> str:
    return comparison(SKETCH, "The same on sketches")


def depth() -> str:
    return comparison(DEPTH, "`tiny-scenes` depth, 224 px, additional SILog × 100")


BLOCKS = {
    "frontier-plans": plans,
    "frontier-goals": goals,
    "frontier-cls": cls,
    "frontier-sketch": sketch,
    "frontier-depth": depth,
}
