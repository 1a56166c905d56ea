"""Whether classes survive pruning (`sec:extra_baselines`): k-NN on pruned class tokens.

By leave-one-out over all labelled pictures that there are, against a bank of unpruned embeddings or one that was pruned
in the same way; and, as the paper does it, with a bank of other pictures. McNemar's test says whether pruning, or the
choice of tokens, changes which pictures are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pullback.evaluation.neighbours import leave_one_out, vote
from pullback.evaluation.statistics import bootstrap_share, mcnemar_p
from pullback.experiments.experiment import (
    Cell,
    Claim,
    Column,
    Experiment,
    Figure,
    Found,
    Measured,
    Place,
    Verdict,
    overall,
)
from pullback.experiments.merging import (
    COLUMNS,
    COUNTS,
    DINOV2,
    DROPPED,
    OURS,
    SELECTIONS,
    TINY,
    TINY_EARLY,
    Point,
    Setting,
    drawn,
    heads_of,
    probe_of,
    spn_of,
)
from pullback.experiments.scales import DRAWN, Scale
from pullback.experiments.workshop import Workshop
from pullback.pruning.scores import metric_score

UNPRUNED, WHOLE = "Unpruned", "0.00"
_PART = 50
_SURE = 0.01
"""A difference with a smaller p is one."""
_NOTHING = "No labelled pictures were measured."


@dataclass(frozen=True)
class Census:
    """Labelled pictures and the rules that are tried on them. ``roles``: where the pictures are; ``queries`` and
    ``bank``: which of them ask and answer with a bank, by role, or of one role the first quarter and the rest."""

    setting: Setting
    roles: tuple[str, ...]
    rules: tuple[str, ...]
    columns: tuple[str, ...]
    queries: str = ""
    bank: str = ""

    @property
    def table(self) -> str:
        return self.setting.table

    @property
    def needs(self) -> tuple[str, ...]:
        """The roles of data beside the first, each once."""
        return tuple(role for role in dict.fromkeys((*self.roles, self.setting.train)) if role != self.roles[0])

    def tables(self) -> dict[str, str]:
        """Return the names of the tables, by what is measured in them."""
        own = self.table
        return {
            "one": f"{own}: leave one out",
            "alike": f"{own}: leave one out, bank pruned alike",
            "bank": f"{own}: with a bank",
            "p": f"{own}: p against unpruned",
            "chosen": f"{own}: p against importance",
        }


_OF_PAPER = ("Importance", "ToMe score", "Random")
_DROPPED = (DROPPED, "ToMe score, dropped", "Random, dropped")
CENSUSES = (
    Census(DINOV2, ("photos-train", "photos", "photos-bank"), (*_OF_PAPER, OURS), COLUMNS, "photos", "photos-bank"),
    Census(TINY, ("scenes",), (*_OF_PAPER, OURS), COLUMNS),
    Census(TINY_EARLY, ("scenes",), (*_DROPPED, OURS), ("0.20", "0.50")),
)
_COUNTS = {"tiny": 400, "small": 1000, "paper": 2000}
_PHOTOS = {"tiny": 200, "small": 2000, "paper": 20000}


def cells(scale: Scale) -> list[Cell]:
    found = []
    for own in CENSUSES:
        tables, setting = own.tables(), own.setting
        about = partial(Cell, model=setting.model, data=own.roles[0], needs=own.needs)
        counted = _COUNTS[scale.name] if own.roles[0] in DRAWN else len(own.roles) * _PHOTOS[scale.name]
        pictures = counted * setting.size_of(scale)
        each = (11 - setting.layer) / 12 * len(own.rules) * len(own.columns)
        for name in ("one", "alike", "bank"):
            forwards = pictures * (1 + each) if name == "one" else 0.0
            places = tuple(Place(tables[name], *place) for place in ((UNPRUNED, WHOLE), *_grid(own, own.rules)))
            found.append(about(f"{own.table}: {name}", places, partial(_top1, own, name), forwards=forwards))
        tests = [Place(tables["p"], rule, f"p {column}") for rule, column in _grid(own, own.rules)]
        tests += [Place(tables["chosen"], rule, f"p {column}") for rule, column in _grid(own, own.rules[1:])]
        found.append(about(f"{own.table}: tests", tuple(tests), partial(_tests, own)))
    return found


def _grid(own: Census, rules: Sequence[str]) -> list[tuple[str, str]]:
    return [(rule, column) for rule in rules for column in own.columns]


def _top1(own: Census, name: str, shop: Workshop) -> Iterable[Measured]:
    embeddings, labels, known = embedded(own, shop)
    table = own.tables()[name]
    for row, column in ((UNPRUNED, WHOLE), *_grid(own, own.rules)):
        queries, whole = embeddings[row, column], embeddings[UNPRUNED, WHOLE]
        if name == "bank":
            asks, answers = known
            hits = vote(whole[answers], labels[answers], queries[asks]) == labels[asks]
        else:
            hits = leave_one_out(whole if name == "one" else queries, labels, queries)
        share = bootstrap_share(hits.cpu().numpy())
        yield Measured(table, row, column, share.mean, share.low, share.high, len(hits))


def _tests(own: Census, shop: Workshop) -> Iterable[Measured]:
    embeddings, labels, _ = embedded(own, shop)
    whole, tables = embeddings[UNPRUNED, WHOLE], own.tables()
    hits = {place: leave_one_out(whole, labels, queries).cpu().numpy() for place, queries in embeddings.items()}
    for rule, column in _grid(own, own.rules):
        p = mcnemar_p(hits[rule, column], hits[UNPRUNED, WHOLE])
        yield Measured(tables["p"], rule, f"p {column}", p, count=len(labels))
    for rule, column in _grid(own, own.rules[1:]):
        p = mcnemar_p(hits[rule, column], hits[own.rules[0], column])
        yield Measured(tables["chosen"], rule, f"p {column}", p, count=len(labels))


# Embeddings


def embedded(own: Census, shop: Workshop) -> tuple[dict[tuple[str, str], Tensor], Tensor, tuple[Tensor, Tensor]]:
    """Return the class tokens [n, D] of all pictures by rule and ratio, the classes [n], and which pictures ask and
    answer with a bank. Kept part by part."""
    setting = own.setting
    probe = probe_of(shop, setting)
    places = [(UNPRUNED, WHOLE), *_grid(own, own.rules)]
    parts, names, where = [], [], []
    for role in own.roles:
        count = _count(shop, role)
        names += shop.classes(role, count)
        where += [role] * count
        readers = shop.image_parts(role, count, _PART, model=setting.model, size=setting.size(shop))
        for number, read in enumerate(readers):
            key = {
                "what": "class-tokens", **shop.identity(probe), "data": role, "first": number * _PART, "count": count,
                "places": places, "counts": dict(shop.experiment.counts[shop.scale.name]), "seed": shop.seed,
            }  # fmt: skip
            first = len(names) - count + number * _PART
            parts.append(shop.kept(key, partial(_embed, own, shop, read, first))["embeddings"])
    embeddings = torch.cat(parts, 1)  # [rules and ratios, n, D]
    numbers = {name: number for number, name in enumerate(sorted(set(names)))}
    labels = torch.tensor([numbers[name] for name in names], device=embeddings.device)
    return dict(zip(places, embeddings, strict=True)), labels, _split(own, where)


def _count(shop: Workshop, role: str) -> int:
    if role in DRAWN:
        return shop.count("scenes")
    available = shop.available(role)
    return shop.count("photos") if available is None else min(available, shop.count("photos"))


def _split(own: Census, where: Sequence[str]) -> tuple[Tensor, Tensor]:
    everyone = torch.arange(len(where))
    if not own.queries:
        return everyone[: len(where) // 4], everyone[len(where) // 4 :]
    asks, answers = (torch.tensor([place == role for place in where]) for role in (own.queries, own.bank))
    return everyone[asks], everyone[answers]


def _embed(own: Census, shop: Workshop, read: Callable[[], Tensor], first: int) -> dict[str, Tensor]:
    """Return the class tokens [rules and ratios, n, D] of a part of the pictures."""
    setting = own.setting
    (head,) = heads_of(shop, setting, 1)
    network = None if setting.early else metric_score(spn_of(shop, setting))
    shop.progress.describe(f"{own.table}: pictures from {first} on")
    found = []
    step = shop.together(10)
    for number, images in enumerate(read().split(step)):
        point = Point(probe_of(shop, setting), images)
        with torch.no_grad():
            importance = head(point.tokens)
            modes = None if network is None else network.modes(point.tokens, point.context)
            chosen = {
                "Importance": importance,
                "ToMe score": point.scored(SELECTIONS["ToMe score"]),
                "Random": drawn(shop, 0, first + step * number, *point.tokens.shape[:2]),
            }
        outputs = [point.full]
        for rule, column in _grid(own, own.rules):
            if rule == OURS:
                output = point.output(point.plan("best", float(column)), importance)
            elif rule.endswith(", dropped"):
                output = point.output(point.plan("drop", float(column)), chosen[rule.removesuffix(", dropped")])
            else:
                output = point.output(point.plan("paper", float(column)), chosen[rule], importance, modes)
            outputs.append(output)
        found.append(torch.stack(outputs))
    return {"embeddings": torch.cat(found, 1)}


# What the paper says


def _judged(found: Found) -> Census | None:
    """The paper's own pictures where they were measured, else the scenes at the same block."""
    return next((own for own in CENSUSES[:2] if found.value(own.tables()["one"], UNPRUNED, WHOLE) is not None), None)


def _stays(found: Found) -> Verdict:
    own = _judged(found)
    if own is None:
        return Verdict("not at this scale", _NOTHING)
    parts: dict[str, bool | None] = {}
    why = []
    for name in ("one", "bank"):
        table = own.tables()[name]
        unpruned = found.row(table, UNPRUNED, WHOLE)
        known = {place: found.value(table, *place) for place in _grid(own, own.rules)}
        if unpruned is None or None in known.values():
            continue
        whole = unpruned["value"]
        away = {place: value - whole for place, value in known.items() if value is not None}
        (rule, column), most = max(away.items(), key=lambda item: abs(item[1]))
        parts[name] = abs(most) <= 0.014
        why.append(
            f"{table}, {unpruned['count']} pictures: {whole:.3f} unpruned, {whole + min(away.values()):.3f} to "
            f"{whole + max(away.values()):.3f} over all rules and ratios, farthest “{rule}” at {column} "
            f"({100 * most:+.1f} points)."
        )
    return overall(parts, " ".join(why) or _NOTHING)


def _safe(found: Found) -> Verdict:
    own = _judged(found)
    if own is None:
        return Verdict("not at this scale", _NOTHING)
    parts, why = _told(found, own, own.tables()["p"], own.rules, "against unpruned")
    return overall(parts, why)


def _cannot_separate(found: Found) -> Verdict:
    own = _judged(found)
    if own is None:
        return Verdict("not at this scale", _NOTHING)
    parts, why = _told(found, own, own.tables()["chosen"], own.rules[1:3], "against importance")
    early = CENSUSES[2]
    if own.setting is TINY and found.value(early.tables()["one"], UNPRUNED, WHOLE) is not None:
        beside, more = _told(found, early, early.tables()["chosen"], early.rules[1:3], "against importance")
        parts, why = parts | beside, f"{why} {more}"
    return overall(parts, why)


def _told(found: Found, own: Census, table: str, rules: Sequence[str], what: str) -> tuple[dict[str, bool | None], str]:
    """Return for each rule whether no ratio tells it apart, and the smallest p of each in words."""
    known = {rule: found.columns(table, rule) for rule in rules}
    least = {rule: min(values.items(), key=lambda item: item[1]) for rule, values in known.items() if values}
    parts: dict[str, bool | None] = {f"{table} {rule}": p >= _SURE for rule, (_, p) in least.items()}
    told = ", ".join(f"“{rule}” p {p:.2g} at {column.removeprefix('p ')}" for rule, (column, p) in least.items())
    return parts, f"{own.table}, smallest p {what}: {told or 'none was measured'}."


def _other_bank(found: Found) -> str | None:
    tables = CENSUSES[0].tables()
    asked, alone = (found.row(tables[name], UNPRUNED, WHOLE) for name in ("bank", "one"))
    if asked is None or alone is None:
        return None
    return (
        "The paper's 0.674 is of DINOv2-B and a bank of 20,000 training pictures. How high top-1 is depends on the "
        f"bank: here it is {asked['value']:.3f} with the bank of this run, and {alone['value']:.3f} where each of "
        f"{alone['count']:,} pictures asks all others. So only differences from the unpruned model tell of pruning."
    )


ACCURACY = Experiment(
    name="accuracy",
    title="Classes after pruning",
    paper_label="sec:extra_baselines",
    about=(
        "Top-1 of a weighted k-NN (k = 20, temperature 0.07) on the class token, by the share of removed patches. "
        "Leave one out: every picture is classified by all others. The heads were trained on some of these pictures, "
        "without their classes. p: McNemar's exact test on the same pictures, with the unpruned bank. After block 6 "
        "tokens are dropped and not merged, since no network for d_task was trained there."
    ),
    columns=(
        *(Column(column, "higher") for column in (WHOLE, *COLUMNS)),
        *(Column(f"p {column}", digits=2) for column in COLUMNS),
    ),
    cells=cells,
    counts={name: {**own, "scenes": _COUNTS[name], "photos": _PHOTOS[name]} for name, own in COUNTS.items()},
    paper={
        Place(CENSUSES[0].tables()["bank"], UNPRUNED, WHOLE): 0.674,
        Place(CENSUSES[0].tables()["bank"], "Importance", "0.50"): 0.670,
        Place(CENSUSES[0].tables()["bank"], "ToMe score", "0.50"): 0.668,
        Place(CENSUSES[0].tables()["bank"], "Random", "0.50"): 0.664,
    },
    claims=(
        Claim(
            "Top-1 stays between 0.66 and 0.68 for every method and ratio (0.674 unpruned): within 1.4 points.",
            "sec:extra_baselines",
            _stays,
        ),
        Claim("Pruning is safe for classification.", "sec:pruning_details", _safe),
        Claim("Top-1 cannot separate the methods.", "sec:extra_baselines", _cannot_separate),
    ),
    figures=tuple(
        Figure(f"curves-{number}", "curves", f"Top-1 by ratio: {own.table}", table=own.tables()["one"])
        for number, own in enumerate(CENSUSES)
    ),
    footnotes=(_other_bank,),
)
