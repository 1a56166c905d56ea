"""Class tokens after a merge: every way to choose tokens inside the paper's one merge, image by image.

The paper's protocol (`eq:dtask`): the tokens that a score ranks lowest go into their nearest kept neighbour under
d_task, by means weighted with the head's importance. All ways to choose share matching and weights; the head and what
is drawn at random have several seeds. d_task is that of a Spectral Pullback Network, as in the paper, or of the exact
modes. Beside it, with the same heads: dropping instead of merging, and the rule `best`.

A stage after block l changes nothing before it, so each image runs up to there once, and the few blocks after it once
for every rule and ratio. What is measured of a setting is kept, and serves all experiments on class tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.backbones import Backbone
from pullback.evaluation.fidelity import cosine_degradation
from pullback.evaluation.ranking import spearman
from pullback.experiments.experiment import Found, Measured, Place
from pullback.experiments.scales import DRAWN, Scale, ScaleName
from pullback.experiments.workshop import HeadRecipe, Workshop
from pullback.geometry.scores import exact_modes
from pullback.learning.fit import FitConfig, fit
from pullback.learning.losses import alignment
from pullback.learning.spn import SpectralPullbackNetwork, SpnConfig
from pullback.learning.train_head import hash_of
from pullback.learning.train_spn import RandNLA, SpnExamples, SpnTask, patch_alignment
from pullback.operators.execution import matmul_precision
from pullback.probes import ProbeMap
from pullback.pruning.forward import TokenState, after_stage, decide, whole_sequence
from pullback.pruning.plan import PrunePlan, preset
from pullback.pruning.scores import Modes, ScoreContext, as_score, metric_score
from pullback.runs.files import replaced_folder
from pullback.targets.recipe import targets_of

RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30, 0.40, 0.50)
COLUMNS = tuple(f"{ratio:.2f}" for ratio in RATIOS)
RANK = 20
_AT_ONCE = 8

SELECTIONS = {
    "Random": "random",
    "ToMe score": "bipartite",
    "Importance": "",  # the head's
    "EViT": "class-attention",
    "Token norm": "norm",
    "CLS similarity": "cls-similarity",
}
"""How tokens are chosen, as the paper calls it, and the name of the score."""
EXACT = "Exact importance"
DROPPED, OURS = "Importance, dropped", "Ours (best)"
LEADS = "importance less another"
"""The table of paired differences."""
RULES = {"spn": tuple(SELECTIONS), "exact": (*SELECTIONS, EXACT, DROPPED, OURS)}
"""What is measured, by where d_task comes from. The last two merge without it."""

COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {
        "images": 32, "train": 160, "early images": 16, "early train": 32, "seeds": 3, "steps": 200, "width": 128,
        "spn images": 96, "spn steps": 150, "spn batch": 4, "spn width": 128, "scene size": 112,
    },
    "small": {
        "images": 200, "train": 1000, "early images": 64, "early train": 256, "seeds": 3, "steps": 320, "width": 256,
        "spn images": 300, "spn steps": 400, "spn batch": 8, "spn width": 256, "scene size": 112,
    },
    "paper": {
        "images": 200, "train": 2000, "early images": 200, "early train": 2000, "seeds": 3, "steps": 3000, "width": 256,
        "spn images": 2000, "spn steps": 2000, "spn batch": 16, "spn width": 256, "scene size": 224,
    },
}  # fmt: skip
"""What every experiment on class tokens measures with, so that they share what was measured and learned."""


@dataclass(frozen=True)
class Setting:
    """A class token whose model is pruned after a block. ``table``: its name in the tables. ``early``: an earlier
    block, where modes cost more, so that there are fewer pictures, and d_task is exact alone."""

    table: str
    model: str
    layer: int
    data: str
    train: str
    early: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Where d_task comes from, the paper's way first."""
        return ("exact",) if self.early else ("spn", "exact")

    def size(self, shop: Workshop) -> int | None:
        """Return the side of scenes in pixels; photographs have the size of the model."""
        return shop.count("scene size") if self.data in DRAWN else None

    def count(self, shop: Workshop, name: str) -> int:
        """Return how many pictures there are to measure on ("images") or to train on ("train"): of a folder with fewer
        all of them."""
        wanted, role = shop.count(f"early {name}" if self.early else name), getattr(self, _ROLES[name])
        available = shop.available(role)
        return wanted if available is None or name == "train" else min(wanted, available)

    @property
    def shifted(self) -> bool:
        """Whether it takes what was learned for the same model on usual pictures."""
        return self.data in ("sketches", "scenes-shifted")

    def forwards(self, scale: Scale, kind: str) -> float:
        """About how many forward passes measuring a kind takes, with what is learned for it. A VJP through frozen
        blocks takes about one of them."""
        counts, columns = COUNTS[scale.name], 192 if self.model == "tiny-scenes" else 768
        share = (11 - self.layer) / 12  # of the blocks
        pictures = counts["early images" if self.early else "images"]
        learns = kind == self.kinds[0] and not self.shifted
        trained = counts["early train" if self.early else "train"] if learns else 0
        steps = counts["spn steps"] * counts["spn batch"] * 4 * RANK if learns and kind == "spn" else 0
        modes = pictures * columns if kind == "exact" else 0
        rules = pictures * len(RULES[kind]) * counts["seeds"] * len(RATIOS)
        return self.size_of(scale) * (pictures + trained + share * (columns * trained + steps + modes + rules))

    def size_of(self, scale: Scale) -> float:
        """Return the area of its pictures over that of 224 x 224 pixels."""
        return (COUNTS[scale.name]["scene size"] / 224) ** 2 if self.data in DRAWN else 1.0


_ROLES = {"images": "data", "train": "train"}
DINOV2 = Setting("DINOv2 CLS, L10", "dinov2", 10, "photos", "photos-train")
CLIP = Setting("CLIP CLS, L10", "clip", 10, "photos", "photos-train")
SKETCHES = Setting("DINOv2 CLS, L10, sketches", "dinov2", 10, "sketches", "photos-train")
TINY = Setting("tiny-scenes CLS, L10", "tiny-scenes", 10, "scenes", "scenes-train")
TINY_SHIFTED = Setting("tiny-scenes CLS, L10, shifted scenes", "tiny-scenes", 10, "scenes-shifted", "scenes-train")
TINY_EARLY = Setting("tiny-scenes CLS, L06", "tiny-scenes", 6, "scenes", "scenes-train", early=True)
SETTINGS = (DINOV2, CLIP, SKETCHES, TINY, TINY_SHIFTED, TINY_EARLY)


class Point:
    """Images where a stage acts, after block l, and the way from there to the class token."""

    def __init__(self, probe: ProbeMap, images: Tensor) -> None:
        assert isinstance(probe.backbone, Backbone) and isinstance(probe.layer, int)
        self.probe, self.layer = probe, probe.layer
        backbone = self.backbone = probe.backbone
        with torch.no_grad(), matmul_precision("float32"):
            taps = backbone.features(images, [self.layer - 1, self.layer])
            self.layout = backbone.token_layout(images)
            self.whole = whole_sequence(taps[self.layer])
            self.tokens = self.whole.values  # F^l [B, N, D]
            self.context = ScoreContext(
                backbone, self.layer, self.layout, self.whole.positions, self.whole.sizes, taps[self.layer - 1]
            )
            self.full = self._output(self.whole)  # [B, M]

    def plan(self, name: str, ratio: float) -> PrunePlan:
        return preset(name, ratio, (self.layer,), depth=self.backbone.depth)

    @torch.no_grad()
    def scored(self, name: str) -> Tensor:
        """Return the scores [B, N] of a name in the registry."""
        return as_score(name)(self.tokens, self.context)

    @torch.no_grad()
    def output(
        self, plan: PrunePlan, chosen: Tensor, weights: Tensor | None = None, modes: Tensor | None = None
    ) -> Tensor:
        """Return the output [B, M] after a plan of one stage. ``chosen`` [B, N]: the lowest go. ``weights`` [B, N] of
        the merge, by default the same. ``modes`` [B, r, N, D] of d_task, scaled."""
        known = None if modes is None else _constant(modes)
        gate, (count,) = (plan.gates[0], plan.fades[0]), plan.counts(self.layout.patches)
        with matmul_precision("float32"):
            matching, own = decide(self.tokens, self.context, plan, _constant(chosen), count, gate, known)
            return self._output(after_stage(self.whole, matching, own if weights is None else weights, plan))

    def _output(self, x: TokenState) -> Tensor:
        backbone, values = self.backbone, x.values
        rope = backbone.rope_of(values, self.layout, x.positions)
        for layer in range(self.layer + 1, backbone.depth):
            rows = self.probe.decoder.rows if layer == backbone.depth - 1 else None
            values = backbone.blocks[layer](values, rope, rows, x.log_sizes)
        return self.probe.decoder.output([values], self.layout, backbone.norm).float()


def _constant(value: Tensor) -> Modes:
    return lambda tokens, context: value


def measured(shop: Workshop, setting: Setting, kind: str) -> dict[str, Tensor]:
    """Return "values" [rules, seeds, ratios, n], 100 (1 - cos) to the unpruned class token with the rules of `RULES`;
    of kind "exact" also "rho" and "rho-patches" [seeds, n] of the heads against imp*, and, where a network was trained,
    "v1" and "v1-patches" [n] of its subspace. Kept for all experiments."""
    probe = probe_of(shop, setting)
    counts = {name: shop.count(name) for name in COUNTS[shop.scale.name]}
    key = {"what": "merging", **shop.identity(probe), "data": setting.data, "train": setting.train, "kind": kind}
    key |= {"early": setting.early, "counts": counts, "seed": shop.seed}
    return shop.kept(key, partial(_measure, shop, setting, probe, kind))


def values_of(shop: Workshop, setting: Setting, kind: str, rule: str) -> Tensor:
    """Return the degradations of a rule [seeds, ratios, n]."""
    return measured(shop, setting, kind)["values"][RULES[kind].index(rule)]


def probe_of(shop: Workshop, setting: Setting) -> ProbeMap:
    return shop.probe(setting.model, "cls", setting.layer)


def heads_of(shop: Workshop, setting: Setting, seeds: int | None = None) -> list[nn.Module]:
    """Return the importance heads of a setting, one for each seed."""
    probe = probe_of(shop, setting)
    count = shop.count("seeds") if seeds is None else seeds
    return [shop.head(probe, recipe_of(shop, setting, seed)) for seed in range(shop.seed, shop.seed + count)]


def recipe_of(shop: Workshop, setting: Setting, seed: int) -> HeadRecipe:
    return HeadRecipe(
        setting.train, setting.count(shop, "train"), setting.size(shop), steps=shop.count("steps"),
        width=shop.count("width"), rank=RANK, seed=seed,
    )  # fmt: skip


def spn_of(shop: Workshop, setting: Setting) -> SpectralPullbackNetwork:
    """Return the Spectral Pullback Network of a setting, trained as the paper does (one round of power iteration in
    every step) when it is first wanted."""
    probe, size = probe_of(shop, setting), setting.size(shop)
    train = shop.count("spn images")
    config = FitConfig(
        steps=shop.count("spn steps"), batch=shop.count("spn batch"), learning_rate=3e-3,
        warmup=shop.count("spn steps") // 10, ema=0.95, validate_every=max(1, shop.count("spn steps") // 4),
        seed=shop.seed,
    )  # fmt: skip
    key = {**shop.identity(probe), **vars(config), "images": train, "data": setting.train, "size": size}
    folder = shop.store / f"spn-{hash_of({**key, 'width': shop.count('spn width')})[:16]}"
    with shop.lacking(folder / "config.json") as lacks:
        if lacks:
            shop.progress.describe("training a Spectral Pullback Network")
            network = _trained_spn(shop, setting, config)
            with replaced_folder(folder) as temporary:
                network.eval().save_pretrained(temporary)
    return SpectralPullbackNetwork.from_pretrained(folder).to(shop.device).eval()


def _trained_spn(shop: Workshop, setting: Setting, config: FitConfig) -> SpectralPullbackNetwork:
    probe, train = probe_of(shop, setting), shop.count("spn images")
    pictures = shop.images(setting.train, train + _AT_ONCE, model=setting.model, size=setting.size(shop))
    features = torch.cat([probe.features(part).as_subclass(Tensor) for part in pictures.split(_AT_ONCE)])
    judged = features[train:]
    known = targets_of(probe, judged, RANK, keep_modes=True)
    assert known.modes is not None
    judge = SpnExamples(
        lambda rows: judged[rows.to(judged.device)], known.modes, known.singular_values, known.total.value,
        probe.backbone.prefix,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shop.seed)
        network = SpectralPullbackNetwork.from_config(SpnConfig(probe.backbone.dim, RANK, shop.count("spn width")))
    network.to(features.device).start_from(judged, known.singular_values)
    task = SpnTask(lambda rows: features[rows.to(features.device)], train, RandNLA(probe, signal_probes=0), judge)
    fit(network, task, config)
    return network


def drawn(shop: Workshop, seed: int, first: int, count: int, tokens: int) -> Tensor:
    """Return uniform scores [count, N] of the images from ``first`` on, each image's own."""
    draws = [torch.rand(tokens, generator=shop.generator("random", seed, first + place)) for place in range(count)]
    return torch.stack(draws).to(shop.device)


def _measure(shop: Workshop, setting: Setting, probe: ProbeMap, kind: str) -> dict[str, Tensor]:
    heads = heads_of(shop, setting)
    network = spn_of(shop, setting) if "spn" in setting.kinds else None
    count = setting.count(shop, "images")
    pixels = shop.images(setting.data, count, model=setting.model, size=setting.size(shop))
    shop.progress.describe(f"{setting.table}: {count} pictures, d_task {'exact' if kind == 'exact' else 'predicted'}")
    parts, step = [], shop.together(_AT_ONCE)
    for first in range(0, count, step):
        point = Point(probe, pixels[first : first + step])
        with torch.no_grad():
            predicted = None if network is None else metric_score(network).modes(point.tokens, point.context)
        modes = exact_modes(probe, RANK)(point.tokens, point.context) if kind == "exact" else predicted
        assert modes is not None
        parts.append(_measure_part(shop, point, kind, heads, modes, first))
        if kind == "exact" and predicted is not None:
            parts[-1] |= _subspace_scores(predicted, modes, probe.backbone.prefix)
    return {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}


@torch.no_grad()
def _measure_part(
    shop: Workshop, point: Point, kind: str, heads: Sequence[nn.Module], modes: Tensor, first: int
) -> dict[str, Tensor]:
    images, tokens = point.tokens.shape[:2]
    known = {rule: point.scored(name) for rule, name in SELECTIONS.items() if name not in ("", "random")}
    if kind == "exact":
        known[EXACT] = torch.linalg.vector_norm(modes, dim=(1, 3))
    values, rho, patches = [], [], []
    for seed, head in enumerate(heads):
        importance = head(point.tokens)
        chosen = known | {"Importance": importance, "Random": drawn(shop, seed, first, images, tokens)}
        values.append([[_degraded(point, rule, ratio, chosen, modes) for ratio in RATIOS] for rule in RULES[kind]])
        if kind == "exact":
            rho.append(spearman(importance, known[EXACT]))
            prefix = point.layout.prefix
            patches.append(spearman(importance[:, prefix:], known[EXACT][:, prefix:]))
    stacked = torch.stack([torch.stack([torch.stack(rule) for rule in one]) for one in values])  # [S, rules, ratios, B]
    found = {"values": stacked.transpose(0, 1)}
    return found if kind == "spn" else {**found, "rho": torch.stack(rho), "rho-patches": torch.stack(patches)}


def _degraded(point: Point, rule: str, ratio: float, chosen: Mapping[str, Tensor], modes: Tensor) -> Tensor:
    importance = chosen["Importance"]
    if rule in (DROPPED, OURS):
        output = point.output(point.plan("drop" if rule == DROPPED else "best", ratio), importance)
    else:
        output = point.output(point.plan("paper", ratio), chosen[rule], importance, modes)
    return cosine_degradation(output, point.full)


def _subspace_scores(predicted: Tensor, exact: Tensor, prefix: int) -> dict[str, Tensor]:
    """Return V_1 [B] of scaled modes [B, r, N, D], over all tokens and over patches."""
    spans = [F.normalize(modes.flatten(2), dim=-1).view_as(modes) for modes in (predicted, exact)]
    return {"v1": alignment(spans[0], spans[1]), "v1-patches": patch_alignment(spans[0], spans[1], prefix)}


# Rows that other experiments have as well


def lead_places(setting: Setting, others: Sequence[str]) -> list[Place]:
    return [Place(LEADS, f"{setting.table}: {other}", column) for other in others for column in COLUMNS]


def lead_rows(shop: Workshop, setting: Setting, others: Sequence[str]) -> Iterator[Measured]:
    """Compare importance with others picture by picture: its error less theirs, below 0 where it is better."""
    kind = setting.kinds[0]
    own = values_of(shop, setting, kind, "Importance").mean(0)  # [ratios, n], each image's mean over seeds
    for other in others:
        beside = values_of(shop, setting, kind if other in RULES[kind] else "exact", other).mean(0)
        for number, column in enumerate(COLUMNS):
            yield shop.mean((LEADS, f"{setting.table}: {other}", column), own[number] - beside[number])


# Reading finished rows


def judged_on(found: Found, wanted: Sequence[Setting], others: Sequence[Setting] = ()) -> list[str]:
    """Return the tables that decide a claim: those of the paper's own models that have values, else of the others."""
    present = {place.table for place in found}
    own = [setting.table for setting in wanted if setting.table in present]
    return own or [setting.table for setting in others if setting.table in present]


def rule_in(found: Found, table: str, rule: str) -> str:
    """Return the row of a rule in the paper's merge, or with exact d_task where that was not measured."""
    return rule if rule in found.rows(table) else exactly(rule)


def exactly(rule: str) -> str:
    """Return the name of a rule's row where d_task is that of the exact modes."""
    return rule if rule in (DROPPED, OURS) else f"{rule}, exact d_task"


def leads(found: Found, table: str, other: str, column: str) -> bool | None:
    """Whether importance is better than another rule beyond the noise. None: it was not measured."""
    row = found.row(LEADS, f"{table}: {other}", column)
    return None if row is None else bool(row["high"] < 0)


def trails(found: Found, table: str, other: str, column: str) -> bool | None:
    """Whether importance is worse than another rule beyond the noise."""
    row = found.row(LEADS, f"{table}: {other}", column)
    return None if row is None else bool(row["low"] > 0)


def factor(found: Found, table: str, rule: str, other: str, column: str) -> float | None:
    """Return how many times smaller a rule's error is than another's."""
    own, beside = (found.value(table, row, column) for row in (rule, other))
    return None if own is None or beside is None else beside / max(own, 1e-12)


def factors(found: Found, table: str, rule: str, other: str, column: str) -> tuple[float, float] | None:
    """Return between which factors a rule's error is smaller than another's, wherever in their intervals both lie."""
    own, beside = (range_in(found, table, row, column) for row in (rule, other))
    return None if own is None or beside is None else (beside[0] / max(own[1], 1e-12), beside[1] / max(own[0], 1e-12))


def exceeds(factors: tuple[float, float] | None, least: float) -> bool | None:
    """Whether a factor is above a number. None: it was not measured, or the intervals decide nothing."""
    if factors is None or factors[0] <= least < factors[1]:
        return None
    return factors[0] > least


def range_in(found: Found, table: str, rule: str, column: str) -> tuple[float, float] | None:
    """Return the interval of a number, or the number twice where it has none."""
    row = found.row(table, rule, column)
    if row is None:
        return None
    low, high = (row["value"] if row[end] is None else row[end] for end in ("low", "high"))
    return float(low), float(high)


def said(value: float | None) -> str:
    """Return a number with three digits."""
    return "–" if value is None else f"{value:.3g}"
