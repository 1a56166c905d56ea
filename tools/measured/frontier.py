"""Degradation against operations: ours, published rules and a smaller picture, frozen, at their best within budgets."""

from __future__ import annotations

from typing import Any

from .common import digits, joined, listed, p_value, read, said, source, table

PLANS = "frontier_plans_cpu.json"
HELD_OUT = "frontier_heldout_cpu.json"
SKETCH = "frontier_sketch_cpu.json"
DEPTH = "frontier_depth_cpu.json"
POLISHED = "frontier_dinov2_heldout_cpu.json"
CLIP, CLIP_SKETCH = "frontier_clip_heldout_cpu.json", "frontier_clip_sketch_cpu.json"
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


def polished() -> str:
    """Plans that were searched and polished at length, beside those of before, and the goals."""
    document, before = read(POLISHED), {point["point"]: point for point in read(HELD_OUT)["points"]}
    rows, improved, apart = [], [], []
    for found in frozen(document):
        old, goal = before[f"planned {found['budget']:g}"], GOALS.get(found["budget"])
        expected = document["expected"][found["point"]]
        asked = ["–", "–"] if goal is None else [f"at most {goal:g}", _met(found, goal)]
        cells = [with_interval(found), with_interval(old), *asked]
        rows.append([f"{found['budget']:g}", setting(point_of(document, found)), digits(expected["polished"]), *cells])
        improved.append(found["mean"] < old["mean"])
        apart.append(found["interval"][1] < old["interval"][0])
    header = [
        "operations",
        "what it does",
        "expected",
        "error [95 % interval]",
        "plan of before",
        "goal",
        "reached",
    ]
    return joined(
        table(header, rows),
        source(POLISHED),
        against(document),
        [
            *who_is_ahead(document),
            said(
                all(improved) and not any(apart),
                "All errors are less than those of the plans of before, with intervals that overlap.",
            ),
        ],
    )


def frozen(document: dict[str, Any]) -> list[Entry]:
    return [found for found in document["contests"] if not found["tuned"]]


def point_of(document: dict[str, Any], found: Entry) -> Entry:
    return next(point for point in document["points"] if point["point"] == found["point"])


def against(document: dict[str, Any]) -> str:
    """One column per budget: what each method loses, the least in bold."""
    found = frozen(document)
    columns = [{"**ours**": one["mean"], **{its["method"]: its["mean"] for its in one["against"]}} for one in found]
    rows = []
    for method in dict.fromkeys(method for column in columns for method in column):
        values = [(column.get(method), min(column.values())) for column in columns]
        rows.append(
            [method, *("–" if v is None else f"**{digits(v)}**" if v == low else digits(v) for v, low in values)]
        )
    return table([f"error, {document['images_compared']} images", *(f"{one['budget']:g}" for one in found)], rows)


def who_is_ahead(document: dict[str, Any]) -> list[str]:
    """Say for each budget whether ours is below every rival, by the intervals of the differences."""
    lines = []
    for found in frozen(document):
        low = min(found["against"], key=lambda its: its["mean"])
        told = f"{found['mean'] / low['mean']:.2f} of {low['method']}, the best of them, p = {p_value(low['p'])}"
        if all(its["interval of it"][1] < 0 for its in found["against"]):
            word = "below every rival"
        elif found["mean"] < low["mean"]:
            word = "below every rival, of which not all can be told from it"
        else:
            word = "**not below every rival**"
        lines.append(f"- At {found['budget']:g} of the operations ours is {word} ({told}).")
    return lines


def clip() -> str:
    """CLIP's frozen plans with what they were expected to lose, and rivals at their mildest within the budget."""
    document = read(CLIP)
    rows = []
    for found in frozen(document):
        expected = document["expected"][found["point"]]
        low = min(found["against"], key=lambda its: its["mean"])
        goal = f"below {digits(low['mean'])}, {low['method']}"
        high = low["interval of it"][1]
        met = "no" if low["difference"] >= 0 else "yes" if high < 0 else "yes, within the noise"
        cells = [digits(expected["polished"]), with_interval(found), goal, met]
        rows.append([f"{found['budget']:g}", setting(point_of(document, found)), *cells])
    searched = list(document["expected"].values())
    one = searched[0]
    header = ["operations", "what it does", "expected", "error [95 % interval]", "goal", "reached"]
    return joined(
        table(header, rows),
        source(CLIP),
        against(document),
        [
            *who_is_ahead(document),
            said(
                all((its["pictures"], its["blocks"]) == (one["pictures"], one["blocks"]) for its in searched),
                f"The search had {one['pictures']} training photographs, of which one half chose, and at most "
                f"{one['stages']} stages after blocks {listed([str(block) for block in one['blocks']])}: a smaller "
                "search than that of DINOv2-S.",
            ),
            _of_small_changes(document),
        ],
    )


def _of_small_changes(document: dict[str, Any]) -> str:
    """Say what the changes after the search did to the error on the pictures that did not choose."""
    told, helped = [], []
    for found in frozen(document):
        one = document["expected"][found["point"]]
        told.append(f"from {digits(one['searched'])} to {digits(one['polished'])} at {found['budget']:g}")
        helped.append(one["polished"] < one["searched"])
    verdict = "helped" if all(helped) else "did not help everywhere" if any(helped) else "did not help"
    return f"- The small changes after the search {verdict} on the half that did not choose: {listed(told)}."


def clip_sketch() -> str:
    document = read(CLIP_SKETCH)
    return joined(against(document), source(CLIP_SKETCH), who_is_ahead(document))


BLOCKS = {
    "frontier-plans": plans,
    "frontier-goals": goals,
    "frontier-polished": polished,
    "frontier-cls": cls,
    "frontier-sketch": sketch,
    "frontier-depth": depth,
    "frontier-clip": clip,
    "frontier-clip-sketch": clip_sketch,
}
