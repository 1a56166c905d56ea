"""What a bottleneck is good for: features in a few thousand bytes, and token importance as a pruning score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pullback.registry import current_score

from .bottleneck import origin
from .common import digits, joined, listed, p_value, pm, read, said, source, span, table

STORAGE, PRUNING = (f"bottleneck_{part}_cpu.json" for part in ("storage", "pruning"))
Case = dict[str, Any]


def storage() -> str:
    document = read(STORAGE)
    parts: list[str | list[str]] = []
    titles = {"scenes": "`tiny-scenes` depth", "dinov2": "DINOv2-S depth on photographs"}
    sentences = []
    for name, case in document["cases"].items():
        rows = []
        for row in case["rows"]:
            cells = [
                f"{row['bytes']:,.0f}",
                shown_bytes(row["shared_bytes"]),
                pm(row["delta1"], 4),
                pm(row["abs_rel"], 4),
            ]
            lead = row["delta1 more than the latent"]
            gap = "" if row["way"] == "latent" else f"{lead['mean']:+.4f} ± {lead['se']:.4f}".replace("-", "−")
            note = f" ({row['note']})" if row["note"] else ""
            rows.append([row["kind"], f"{row['way']}{note}", *cells, gap])
        header = ["numbers", "stored", "bytes an image", "shared", "δ1", "AbsRel", "δ1 more than the latent"]
        parts += [
            f"**{titles[name]}**: {case['latent']:,} numbers in place of {case['features_bytes']:,} bytes of features "
            f"(float16), {case['images']} held-out images, bases and codebooks from {case['train_images']:,}:",
            table(header, rows),
        ]
        sentences += storage_sentences(titles[name], case["rows"])
    return joined(*parts, source(STORAGE), sentences)


def storage_sentences(title: str, rows: Sequence[Case]) -> list[str]:
    """Say what beats the latent at equal bytes, and what it beats: ways that do so in every kind of numbers."""
    signs: dict[str, set[int]] = {}
    bytes_of = {row["kind"]: row["bytes"] for row in rows if row["way"] == "latent"}
    for row in rows:
        if row["way"] != "latent":
            fewer = " (in fewer bytes)" if row["bytes"] < 0.9 * bytes_of[row["kind"]] else ""
            signs.setdefault(row["way"].partition(", ")[0] + fewer, set()).add(clearly(row))
    ahead, behind = ([way for way, own in signs.items() if own == {sign}] for sign in (1, -1))
    sentences = []
    if behind:
        sentences.append(f"- {title}: at equal bytes the latent keeps more of the depth than {listed(behind)}.")
    if ahead:
        sentences.append(
            f"- {title}: it keeps less than {listed(ahead)}. The latent pays where the backbone shall not run again "
            "and other heads of these layers want features."
        )
    return sentences


def clearly(row: Case) -> int:
    """Return the sign of the lead over the latent, 0 within two standard errors."""
    lead = row["delta1 more than the latent"]
    return 0 if abs(lead["mean"]) <= 2 * lead["se"] else 1 if lead["mean"] > 0 else -1


def shown_bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{digits(count / size, 2)} {unit}"
    return f"{count} B" if count else "–"


def pruning() -> str:
    document = read(PRUNING)
    titles = {
        "scenes": "`tiny-scenes` depth (bottleneck without cells)",
        "saliency": "DINOv2-S saliency",
        "dinov2": "DINOv2-S depth",
    }
    measures = {"silog": "SILog × 100", "relative_l2": "relative L2 × 100"}
    parts: list[str | list[str]] = []
    sentences: list[str] = []
    for name, case in document["cases"].items():
        size = f" of {case['settings']['size']} pixels" if case["settings"]["size"] else ""
        ratios = list(dict.fromkeys(row["ratio"] for row in case["rows"]))
        by_score: dict[str, dict[float, Case]] = {}
        for row in case["rows"]:
            by_score.setdefault(current_score(row["score"]), {})[row["ratio"]] = row
        rows = []
        for score, own in by_score.items():
            first = next(iter(own.values()))
            cost = ["–" if first["products"] is None else f"{first['products']:,}"]
            cost.append("–" if first["milliseconds"] is None else digits(first["milliseconds"], 2))
            rho = pm(first["spearman"], 3) if "spearman" in first else ""
            title = "bipartite (ToMe's matching, one stage)" if score == "bipartite" else score
            rows.append([title, *cost, rho, *(gap_of(own[ratio]) for ratio in ratios)])
        header = [
            "score",
            "products",
            "ms an image",
            "ρ with exact",
            *(f"{100 * ratio:.0f} % removed" for ratio in ratios),
        ]
        parts += [
            f"**{titles[name]}, {measures[case['measure']]}**, after block {case['stage']}, {case['images']} images"
            f"{size}, M' = {case['size']:,}:",
            table(header, rows),
        ]
        sentences += pruning_sentences(titles[name], by_score)
    return joined(
        *parts,
        origin(document["cases"], titles, PRUNING),
        "Preset `best`. Of the first row the error itself with its 95 % interval, of the others what is added to it, "
        "image by image. *Exact* is converged; heads learned block norms of the same pictures from as many products of "
        "either probe. Times are of a machine that other work shared.",
        sentences,
    )


def gap_of(row: Case) -> str:
    low, high = row["interval"]
    if "more than exact" not in row:
        return f"{digits(row['mean'])} ({digits(low)} to {digits(high)})"
    gap = row["more than exact"]
    return f"{gap['mean']:+.3f} ({gap['low']:+.3f} to {gap['high']:+.3f})".replace("-", "−")


def pruning_sentences(title: str, by_score: dict[str, dict[float, Case]]) -> list[str]:
    """Compare the importance through the bottleneck with the original one, and with scores without a Jacobian."""
    own = by_score["exact, bottleneck"]
    gaps = [row["more than exact"] for row in own.values()]
    worse, better = sum(gap["low"] > 0 for gap in gaps), sum(gap["high"] < 0 for gap in gaps)
    others = [score for score in by_score if "," not in score]
    beaten = [score for score in others if all(own[ratio]["mean"] < by_score[score][ratio]["mean"] for ratio in own)]
    against = (
        f"its mean error is below that of {listed(beaten)}" if beaten else "no score without a Jacobian is behind it"
    )
    first, exact = next(iter(own.values())), next(iter(by_score["exact, original"].values()))
    slower = first["milliseconds"] / first["products"] / (exact["milliseconds"] / exact["products"])
    heads = [by_score["head, bottleneck"][ratio]["mean"] / by_score["head, original"][ratio]["mean"] for ratio in own]
    return [
        f"- {title}: chosen through the bottleneck, the error is larger outside the interval at {worse} of {len(gaps)} "
        f"ratios and smaller at {better} (p: {', '.join(p_value(gap['p']) for gap in gaps)}); at every ratio "
        f"{against}.",
        said(
            slower > 1 and first["milliseconds"] > exact["milliseconds"],
            f"It saves nothing: a product takes {slower:.1f} times as long, since it runs through the network of the "
            "bottleneck as well.",
        ),
        f"- A head that learned from it has {span(heads)} times the error of one that learned as much from the "
        "original.",
    ]


BLOCKS = {"bottleneck-storage": storage, "bottleneck-pruning": pruning}
