"""What the pruning theorem says of real runs."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from .common import digits, joined, read, said, source, span, table

NAME = "pruning_bound.jsonl"
TITLES = {
    ("cls", "final"): "DINOv2-S `cls`",
    ("depth-8x8", "final"): "tiny-scenes `depth-8x8`, final layer",
    ("depth-8x8", "all"): "tiny-scenes `depth-8x8`, all four layers",
    ("saliency", "final"): "DINOv2-S saliency",
}
Rows = list[dict[str, Any]]


def groups() -> dict[tuple[str, str, float, str], Rows]:
    """Rows by decoder, tensor, ratio and preset, in the order of the table."""
    rows = read(NAME)
    order = [(*key, ratio, preset) for key in TITLES for ratio in (0.1, 0.5) for preset in ("paper", "best")]
    found = {
        key: [row for row in rows if (row["decoder"], row["tensor"], row["ratio"], row["preset"]) == key]
        for key in order
    }
    if sum(map(len, found.values())) != len(rows):
        raise ValueError(f"{NAME} holds rows that the table does not show")
    return found


def bound() -> str:
    rows = []
    for (decoder, tensor, ratio, preset), own in groups().items():
        parts = []
        for name in ("true_error", "removed_error", "first_term", "second_term"):
            parts.append(digits(100 * mean(row[name] / row["output_norm"] for row in own)))
        fails = f"{sum(row['fails'] for row in own)} of {len(own)}"
        whole = [
            digits(100 * mean(row[name] / row["output_norm"] for row in own))
            for name in ("corrected_first_term", "corrected_second_term")
        ]
        loose = f"{mean(row['corrected'] / row['true_error'] for row in own):.0f}"
        moved = [digits(100 * mean(row[name] for row in own), 2) for name in ("kept_residual", "removed_residual")]
        share = digits(100 * mean(row["kept_energy"] for row in own), 2)
        order = f"{mean(row['remainder_order'] for row in own):.2f}"
        first = ratio == 0.1 and preset == "paper"
        label = [TITLES[decoder, tensor] if first else "", str(ratio), preset]
        rows.append([*label, *parts, fails, *whole, loose, *moved, share, order])
    header = ["decoder", "η", "preset", "true error", "of removed", "first term", "second term", "fails", "all: first"]
    header += ["all: second", "all / error", "kept ρ", "removed ρ", "kept share of ρ²", "order"]
    return joined(table(header, rows), source(NAME))


def chosen(decoders: tuple[str, ...], preset: str | None = None) -> list[Rows]:
    return [own for key, own in groups().items() if key[0] in decoders and preset in (None, key[3])]


def findings() -> str:
    rows, dense = read(NAME), ("depth-8x8", "saliency")
    cls = chosen(("cls",))
    every = [row for own in cls for row in own]
    kept = {p: [100 * mean(r["kept_energy"] for r in own) for own in chosen(dense, p)] for p in ("paper", "best")}
    removed = {
        p: [
            100 * mean(r["removed_error"] for r in own) / mean(r["true_error"] for r in own) for own in chosen(dense, p)
        ]
        for p in ("paper", "best")
    }
    short = [median(row["true_error"] / row["stated"] for row in own) for own in cls]
    loose_cls = [mean(row["corrected"] / row["true_error"] for row in own) for own in cls]
    loose = [row["stated"] / row["true_error"] for own in chosen(dense) for row in own]
    left_out = [100 * median(1 - r["first_term"] / r["corrected_first_term"] for r in own) for own in chosen(dense)]
    hidden = [median(row["corrected_first_term"] / row["linear_change"] for row in own) for own in chosen(dense)]
    second = {
        p: [median(r["remainder"] / r["true_error"] for r in own) for own in chosen(dense, p)]
        for p in ("paper", "best")
    }
    second_cls = [median(row["remainder"] / row["true_error"] for row in own) for own in cls]
    orders = {name: [row["remainder_order"] for row in rows if row["decoder"] == name] for name in TITLES_ONCE}
    final = {
        preset: [
            median(row["true_error"] / row["output_error"] for row in own)
            for key, own in groups().items()
            if key[:2] == ("depth-8x8", "final") and key[3] == preset
        ]
        for preset in ("paper", "best")
    }
    return joined(
        [
            said(
                all(row["kept_moved"] == 1 for row in rows),
                f"**The premise never holds.** In each of the {len(rows)} rows (image × ratio × preset × reading) "
                "every kept token moved. "
                f"For dense decoders they carry {span(kept['paper'], 0)} % of |F − F̂|² with `paper` and "
                f"{span(kept['best'], 0)} % with "
                f"`best`. The error of the removed tokens alone is {span(removed['paper'], 0)} % (`paper`) and "
                f"{span(removed['best'], 0)} % (`best`) of the true error.",
            ),
            said(
                all(row["fails"] and row["holds_for_sure"] and row["first_term"] == 0 for row in every),
                "**Class-token decoders: the theorem says nothing.** At the final layer every removed token has a zero "
                "block, so the first "
                f"term is zero. With the measured β the bound fails on all images, by a factor of {span(short, 0)} "
                "(medians). With β "
                "measured where the decoder reads it holds, but for no reason: the removed rows of F̂ are free to "
                "choose. The "
                f"corrected bound is {span(loose_cls, 0)} times the true error.",
            ),
            said(
                not any(row["fails"] for own in chosen(dense) for row in own),
                f"**Dense decoders: the stated bound holds, by slack.** It is {span(loose, 0)} times the true error. "
                "Kept tokens, which it "
                f"leaves out, are {span(left_out, 0)} % of the corrected first term, and adding norms token by token "
                "is "
                f"{span(hidden, 0)} times |J(F − F̂)| (medians). A bound that loose ranks plans and predicts nothing.",
            ),
            said(
                min(second["paper"]) > 1 > max(second["best"]),
                "**The second term is not small where features are stale.** The remainder over the true error "
                "(medians): "
                f"{span(second['paper'], 1)} with `paper` and {span(second['best'], 1)} with `best` for dense "
                "decoders, "
                f"{span(second_cls)} for the class token.",
            ),
            said(
                max(abs(value - 2) for value in orders["cls"]) < 0.05,
                "**Decoders with ReLUs are not C²**, so their β does not exist. The remainder's order is "
                f"{span(orders['cls'])} for the class token, {span(orders['saliency'], 1)} for saliency and "
                f"{span(orders['depth-8x8'], 1)} for depth, image by image.",
            ),
            said(
                max(final["paper"]) < min(final["best"]),
                "**Several layers.** The final-layer tensor of the depth decoder carries "
                f"{span(final['paper'])} of the output's error with `paper` and {span(final['best'])} with `best` "
                "(medians); the rest "
                "comes through layers that the theorem's φ does not see.",
            ),
        ]
    )


TITLES_ONCE = tuple(dict.fromkeys(decoder for decoder, _ in TITLES))
BLOCKS = {"theorem-bound": bound, "theorem-findings": findings}
