"""Pruning of class tokens and dense decoders: degradation, tests, choices, budgets and speed."""

from __future__ import annotations

from typing import Any

from pullback.runs.documents import with_current_names

from .common import digits, joined, p_value, pm, read, said, signed, source, span, table

LAYERS = ("L10", "L06", "L03")
SCORES = {
    "importance": "importance head",
    "exact": "exact imp*",
    "class-attention": "class attention (EViT's score)",
    "cls-similarity": "CLS similarity",
    "norm": "token norm",
    "bipartite": "bipartite similarity (ToMe's matching)",
    "random": "random",
}
OTHERS = ("random", "bipartite", "class-attention", "norm", "cls-similarity")
"""Scores that look at no Jacobian."""
BASELINES = {
    ("bipartite", "bipartite"): "`bipartite` (ToMe's matching, one stage)",
    ("strided", "strided"): "`strided`",
    ("attention-drop", "class-attention"): "`attention-drop` (EViT's score, one stage)",
}
"""Presets with their own score."""
HEADS = {
    "77fc5652c3ee7793": "256 × 1",
    "4ebeaef1a2f10f49": "256 × 2",
    "743c1405ff3fb8a5": "512 × 2, with dropout",
    "0ee659308db21e4d": "512 × 1",
    "e0cefcaf0cae2cad": "256 × 1",
    "8cb205219b3430fd": "256 × 1",
    "2d704512c183a254": "256 × 1",
}
"""Width × rounds of the heads, by the hash that the files store."""

Rules = dict[tuple[str, str, float], dict[str, Any]]


def cls_file(layer: str) -> str:
    return f"prune_dinov2s_cls_{layer}.json"


def rules(name: str) -> Rules:
    """Return the rules of a comparison by preset, score and ratio, by the names that they have now."""
    summary = with_current_names(read(name))
    return {(rule["preset"], rule["score"], rule["ratio"]): rule for rule in summary["rules"]}


def p_against(found: Rules, preset: str, score: str, ratio: float, reference: str) -> float:
    """The stored p of a score against the reference score under the same preset."""
    tests = found[preset, score, ratio]["tests"]
    return next(own["p_value"] for own in tests if (own["preset"], own["score"]) == (preset, reference))


def degradation(name: str, lines: list[tuple[str, str, str]], count: int = 3) -> str:
    """One line per rule and one column per ratio; the smallest of each column is bold."""
    found, ratios = rules(name), read(name)["ratios"]
    best = {ratio: min(found[preset, score, ratio]["mean"] for _, preset, score in lines) for ratio in ratios}
    rows = []
    for title, preset, score in lines:
        values = [found[preset, score, ratio]["mean"] for ratio in ratios]
        cells = [digits(value, count) for value in values]
        rows.append(
            [title, *(f"**{c}**" if v == best[r] else c for c, v, r in zip(cells, values, ratios, strict=True))]
        )
    return table(["removed", *(f"{ratio:.0%}" for ratio in ratios)], rows)


def cls() -> str:
    parts = []
    for layer in LAYERS:
        name = cls_file(layer)
        document = read(name)
        lines = [(f"`{preset}`, importance head", preset, "importance") for preset in ("best", "paper", "drop")]
        lines += [(title, preset, score) for (preset, score), title in BASELINES.items()]
        scores = ("exact", "class-attention", "cls-similarity", "norm", "bipartite", "random")
        lines += [(f"`best`, {SCORES[score]}", "best", score) for score in scores]
        head = HEADS[document["head"][0]]
        title = (
            f"**After block {document['stages'][0]}**, head {head}, {document['images']} images, cosine distance × 100"
        )
        parts += [title, degradation(name, lines), source(name)]
    return joined(*parts, cls_findings())


def cls_findings() -> list[str]:
    found = {layer: rules(cls_file(layer)) for layer in LAYERS}
    ratios = read(cls_file("L03"))["ratios"]
    mean = {
        (layer, preset): [own[preset, "importance", ratio]["mean"] for ratio in ratios]
        for layer, own in found.items()
        for preset in ("best", "paper", "drop")
    }
    shares = {
        layer: [a / b for a, b in zip(mean[layer, "best"], mean[layer, "paper"], strict=True)] for layer in LAYERS
    }
    rivals = [
        found[layer]["best", "importance", ratio]["mean"] < found[layer][preset, score, ratio]["mean"]
        for layer in LAYERS
        for ratio in ratios
        for preset, score in (
            ("paper", "importance"),
            ("drop", "importance"),
            *BASELINES,
        )
    ]
    worst = {
        layer: max(p_against(found[layer], "best", score, ratio, "importance") for score in OTHERS for ratio in ratios)
        for layer in LAYERS
    }
    ahead = all(
        found[layer]["best", score, ratio]["mean"] > found[layer]["best", "importance", ratio]["mean"]
        for layer in LAYERS
        for score in OTHERS
        for ratio in ratios
    )
    unclear = [
        f"{SCORES[score]} at {ratio:.0%} (p = {p_value(p)})"
        for score in OTHERS
        for ratio in ratios
        if (p := p_against(found["L03"], "paper", score, ratio, "importance")) > 0.01
    ]
    texts = ", ".join(f"{span(shares[layer])} at {layer}" for layer in LAYERS)
    return [
        said(
            all(rivals),
            "`best` has the smallest error of all presets by the same head, and of the single-stage baselines, "
            "everywhere.",
        ),
        said(max(max(own) for own in shares.values()) < 0.5, f"Its error over that of `paper`: {texts}."),
        said(
            all(
                a > b
                for layer in ("L03", "L10")
                for a, b in zip(mean[layer, "paper"], mean[layer, "drop"], strict=True)
            ),
            "`paper` has a larger mean error than `drop` at L3 and L10 at every ratio.",
        ),
        said(
            ahead and max(worst.values()) < 1e-3,
            "Under `best` the head beats the five scores without a Jacobian at every ratio (paired Wilcoxon over the "
            "images; largest p "
            f"{', '.join(f'{p_value(worst[layer])} at {layer}' for layer in LAYERS)}).",
        ),
        said(bool(unclear), f"Under `paper` at L3 it is not clear against {', '.join(unclear)}."),
    ]


def knn() -> str:
    name = cls_file("L03")
    found, document = rules(name), read(name)
    error = (document["unpruned"]["knn"] * (1 - document["unpruned"]["knn"]) / document["images"]) ** 0.5
    lines = [(preset, score) for preset in ("best", "paper") for score in ("importance", "random")]
    rows = [["unpruned", *[f"{document['unpruned']['knn']:.3f}"] * len(document["ratios"])]]
    for preset, score in lines:
        cells = [f"{found[preset, score, ratio]['knn']:.3f}" for ratio in document["ratios"]]
        rows.append([f"`{preset}`, {SCORES[score]}", *cells])
    header = ["L3, k-NN top-1", *(f"{ratio:.0%} removed" for ratio in document["ratios"])]
    return joined(table(header, rows), source(name), f"The standard error of one cell is about {error:.3f}.")


def small_heads() -> str:
    """How much the result at L3 depends on the head."""
    names = [cls_file("L03"), "prune_dinov2s_cls_L03_512x1.json", "prune_dinov2s_cls_L03_256x1.json"]
    rows = []
    for name in names:
        found, document = rules(name), read(name)
        ratios = [0.1, 0.2, 0.3, 0.5, 0.75]
        cells = [
            digits(found["best", "importance", ratio]["mean"]) if ratio in document["ratios"] else ""
            for ratio in ratios
        ]
        p, score, ratio = max(
            (p_against(found, "best", score, ratio, "importance"), score, ratio)
            for score in OTHERS
            for ratio in (0.1, 0.2, 0.3, 0.5)
        )
        weakest = f"{p_value(p)}, {SCORES[score]} at {ratio:.0%}"
        rows.append([HEADS[document["head"][0]], *cells, weakest])
    header = ["L3 head", "10%", "20%", "30%", "50%", "75%", "largest p against five other scores, to 50%"]
    wide = "prune_dinov2s_cls_L03_518px.json"
    large = {ratio: rules(wide)["best", "importance", ratio] for ratio in (0.5, 0.75)}
    small = rules(names[-1])
    return joined(
        table(header, rows),
        source(*names),
        f"At 518 px the same 256 × 1 head, trained at 224 px, costs {digits(large[0.5]['mean'])} with half and "
        f"{digits(large[0.75]['mean'])} with three quarters removed ({large[0.5]['images']} images; {source(wide)}); "
        "at 224 px "
        f"{digits(small['best', 'importance', 0.5]['mean'])} and {digits(small['best', 'importance', 0.75]['mean'])}. "
        "Removing three quarters after block 3 is fast, and far from the output.",
    )


VARIANTS = {
    "gate -1": "no gate",
    "trust 0": "trust 0: distance alone",
    "trust 1": "trust 1: the product",
    "without sizes": "sizes not counted in attention",
    "weighted by size": "mean by size, not importance",
    "as they were": "removed tokens come back as they were",
    "copies of their partners": "removed tokens are copies of their partners",
}


def choices_table(columns: dict[str, list[dict[str, Any]]], places: dict[str, int]) -> str:
    """Rows are variants of `best`; cells the paired difference to it, empty where the variant is the preset itself."""
    names = list(dict.fromkeys(row["variant"] for rows in columns.values() for row in rows))
    lines = []
    for name in names:
        cells = []
        for column, rows in columns.items():
            row = next((row for row in rows if row["variant"] == name), None)
            if row is None:
                cells.append("")
            elif name == "preset":
                cells.append(digits(row["mean"]))
            else:
                more = row["more than the preset"]
                cells.append(signed(more["mean"], more["se"], places[column]))
        lines.append(["`best`" if name == "preset" else VARIANTS.get(name, name), *cells])
    return table(["one choice changed", *columns], lines)


def choices_cls() -> str:
    name = "pruning_choices_cpu.json"
    rows = read(name)["rows"]
    columns = {
        f"L{layer}": [row for row in rows if row["layer"] == layer and row["ratio"] == 0.5] for layer in (3, 6, 10)
    }
    more = {layer: {row["variant"]: row["more than the preset"] for row in own} for layer, own in columns.items()}
    sizes = all(own["without sizes"]["mean"] > 2 * own["without sizes"]["se"] for own in more.values())
    guard = more["L6"]["artifacts may take in others"], more["L10"]["artifacts may take in others"]
    return joined(
        table_title("half removed, cosine × 100", read(name)["images"], "training images"),
        choices_table(columns, {"L3": 2, "L6": 3, "L10": 3}),
        source(name),
        [
            said(sizes, "Counting the sizes of merged tokens in attention matters at every layer."),
            said(
                all(own["mean"] < 0 for own in guard),
                "Letting artifacts take in others would be slightly better at L6 and L10; `best` forbids it, because "
                "what it guards "
                "against can ruin single images.",
            ),
        ],
    )


def table_title(what: str, count: int, images: str) -> str:
    return f"**{what[0].upper()}{what[1:]}**, {count} {images}, paired difference to `best` ± standard error:"


def choices_dense() -> str:
    names = {"depth": "pruning_choices_depth_cpu.json", "saliency": "pruning_choices_saliency_cpu.json"}
    columns, places, better = {}, {}, []
    for decoder, name in names.items():
        for ratio in (0.3, 0.5):
            title = f"{decoder}, {ratio:.0%}"
            columns[title] = [row for row in read(name)["rows"] if row["ratio"] == ratio]
            places[title] = 3 if decoder == "depth" else 2
            (other,) = [row["more than the preset"] for row in columns[title] if row["variant"] == "trust 0.3"]
            better.append(other["mean"] < 0)
    worst = [max(own, key=lambda row: row["mean"])["variant"] for own in columns.values()]
    counts = {decoder: read(name)["images"] for decoder, name in names.items()}
    return joined(
        choices_table(columns, places),
        source(*names.values()),
        f"{counts['depth']} scenes (SILog × 100) and {counts['saliency']} training images (relative L2 × 100), by "
        "learned heads.",
        [
            said(set(worst) == {"as they were"}, "Moving removed tokens with their partners is what matters most."),
            said(
                all(better),
                "With a learned head a trust of 0.3 would be better than the preset's 0.7, which was chosen with exact "
                "importance.",
            ),
        ],
    )


def dense_lines(own: str) -> list[tuple[str, str, str]]:
    scores = (own, "cls-similarity", "norm", "bipartite", "class-attention", "random")
    lines = [(f"`best`, {SCORES[score]}", "best", score) for score in scores]
    lines += [(BASELINES[name, name], name, name) for name in ("bipartite", "strided")]
    return lines + [(f"`paper`, {SCORES[score]}", "paper", score) for score in (own, "random")]


def dense_findings(name: str, own: str) -> list[str]:
    found, ratios = rules(name), read(name)["ratios"]
    factors = [found["paper", own, ratio]["mean"] / found["best", own, ratio]["mean"] for ratio in ratios]
    lines = [
        said(
            min(factors) > 2,
            f"`best` has 1/{max(factors):.0f} to 1/{min(factors):.0f} of the error of the paper's pipeline.",
        )
    ]
    unclear, beaten = [], False
    for score in OTHERS:
        for ratio in ratios:
            p = p_against(found, "best", score, ratio, own)
            better = found["best", score, ratio]["mean"] < found["best", own, ratio]["mean"]
            if p > 0.01:
                unclear.append(f"{SCORES[score]} at {ratio:.0%} (p = {p_value(p)}{', lower mean' if better else ''})")
            else:
                beaten = beaten or better
    words = f" except against {', '.join(unclear)}" if unclear else ""
    sentence = (
        f"Under `best` the {SCORES[own]} beats the scores without a Jacobian with p < 0.01 at every ratio{words}."
    )
    return [*lines, said(not beaten, sentence)]


def dense_exact(name: str, what: str) -> str:
    document = read(name)
    return joined(
        f"**{what}**, after block {document['stages'][0]}, {document['images']} images:",
        degradation(name, dense_lines("exact")),
        source(name),
        dense_findings(name, "exact"),
    )


def depth() -> str:
    return dense_exact(
        "prune_tiny_scenes_depth_L04.json", "`tiny-scenes` depth, additional SILog × 100, exact imp* of log depth"
    )


def saliency() -> str:
    name = "prune_saliency_L04.json"
    found, ratios = rules(name), read(name)["ratios"]
    loses = all(found["paper", "exact", r]["mean"] > found["paper", "random", r]["mean"] for r in ratios)
    line = said(
        loses, "In the paper's own pipeline importance loses to random selection here; why was not looked into."
    )
    return joined(
        dense_exact(name, "Saliency decoder on its own DINOv2-S, relative L2 × 100, exact imp*") + "\n" + line
    )


def dense_heads() -> str:
    parts = []
    for name, what in (
        ("prune_tiny_scenes_depth_L04_head.json", "`tiny-scenes` depth, additional SILog × 100"),
        ("prune_saliency_L04_head.json", "Saliency, relative L2 × 100"),
    ):
        document = read(name)
        head = HEADS[document["head"][0]]
        parts += [
            f"**{what}**, L4 head {head}, {document['images']} images:",
            degradation(name, dense_lines("importance")),
            source(name),
            dense_findings(name, "importance"),
        ]
    return joined(*parts)


def schedules(name: str, value: str, what: str) -> str:
    document = read(name)
    found = {(row["preset"], tuple(row["stages"]), row["of"]): row for row in document["rows"]}
    plans = list(dict.fromkeys(tuple(row["stages"]) for row in document["rows"]))
    rows = []
    for of in dict.fromkeys(row["of"] for row in document["rows"]):
        cells = []
        for preset in ("best", "paper"):
            own = [found[preset, stages, of] for stages in plans]
            least = min(row[value] for row in own)
            for row in own:
                number = f"{digits(row[value])} ± {digits(row['se'], 2)}"
                cells.append((f"**{number}**" if row[value] == least else number) + f" ({row['ratio']:.2f})")
        left = [found[preset, plans[0], of]["operations"] for preset in ("best", "paper")]
        rows.append([f"{left[0]:.2f}, {left[1]:.2f}", *cells])
    header = ["operations left, `best` and `paper`"]
    header += [f"`{preset}` {list(stages)}" for preset in ("best", "paper") for stages in plans]
    four = [found["best", plans[-1], 0.5], found["best", plans[0], 0.5]]
    share = 1 - four[0][value] / four[1][value]
    return joined(
        f"**{what}**, {document['images']} images, score: {document['score']}. In brackets the ratio that keeps within "
        "these operations.",
        table(header, rows),
        source(name),
        [
            said(
                share > 0.2,
                f"With half removed by one stage, four stages at the same operations have {share:.0%} less error "
                "(`best`).",
            )
        ],
    )


def schedules_depth() -> str:
    return schedules("pruning_schedules.json", "silog", "`tiny-scenes` depth, SILog × 100")


def schedules_saliency() -> str:
    return schedules("pruning_schedules_saliency.json", "relative_l2", "Saliency, relative L2 × 100")


def planner() -> str:
    name = "pruning_planner_cuda.json"
    document = read(name)
    words = {
        "flops": "{limit:.2f} of the operations",
        "milliseconds": "{limit:.2f} ms a batch",
        "degradation": "degradation {limit}",
    }
    rows, off = [], []
    for row in document["budgets"]:
        expected, held = row["expected"], row["held_out"]
        off.append(row["off"])
        rows.append(
            [
                words[row["budget"]].format(limit=row["limit"]),
                _chosen(row),
                f"{expected['flops']:.3f}, {held['flops']:.3f}",
                f"{expected['milliseconds']:.2f}, {held['milliseconds']:.2f} ms",
                f"{expected['degradation']:.2f} ± {expected['se']:.2f}, {held['degradation']:.2f} ± {held['se']:.2f}",
            ]
        )
    header = ["budget", "chosen", "operations: expected, held out", "time: expected, held out"]
    worst = [max(abs(own[key]) for own in off) for key in ("milliseconds", "degradation")]
    return joined(
        table([*header, "degradation: expected, held out"], rows),
        source(name),
        f"Planned on {document['images']} training images, checked on as many held-out ones, batches of "
        f"{document['batch']}, uncompiled.",
        [
            said(worst[0] < 0.01, f"Time comes out within {100 * worst[0]:.1f} % of the forecast."),
            said(
                worst[1] < 0.15, f"Degradation comes out within {100 * worst[1]:.0f} % of the forecast, always higher."
            ),
        ],
    )


def _chosen(row: dict[str, Any]) -> str:
    """Write what a plan does: "196 px, 65% after 3, 6"; earlier results knew no sizes."""
    parts = [f"{row['size']} px"] if row.get("size") else []
    if row["stages"]:
        parts.append(f"{100 * row['ratio']:.4g}% after {', '.join(map(str, row['stages']))}")
    return ", ".join(parts) or "nothing removed"


def precision() -> str:
    name = "pruning_precision_cpu.json"
    document = read(name)
    rows = [
        [
            row["precision"],
            f"{pm(row['whole'], 2)} %",
            f"{pm(row['pruned'], 2)} %",
            f"{100 * row['other tokens removed']['mean']:.2f} %",
        ]
        for row in document["rows"]
    ]
    header = ["against float32, relative L2", "whole model", "pruned", "other tokens removed"]
    return joined(
        table(header, rows),
        source(name),
        f"{document['images']} ImageNet images, {document['ratio']:.0%} removed after block {document['stage']}.",
    )


def fastest(case: dict[str, Any], prefix: str) -> float:
    """Milliseconds of the fastest form (eager, compiled, CUDA graphs)."""
    return min(value for name, value in case["ms"].items() if name.startswith(f"{prefix}:"))


def speed_rows(document: dict[str, Any]) -> list[list[str]]:
    rows = []
    for case in document["cases"]:
        head = case["head"]
        before = fastest(case, "unpruned")
        after = fastest(case, case["schedule"] + ("" if head is None else f", head {head}"))
        if abs(before / after - case["speedup"]) > 1e-6:
            raise ValueError("the stored speed-up is not the ratio of the fastest forms")
        staged = "stage_ms" in case
        rows.append(
            [
                f"{case['pixels']} px, batch {case['batch']}",
                case["schedule"],
                "–" if head is None else head.replace("x", " × "),
                f"{digits(before)} ms",
                f"{digits(after)} ms",
                f"{case['speedup']:.2f}×",
                f"{case['arithmetic_limit']:.2f}×",
                f"{digits(case['stage_ms'], 2)} ms, {case['stage_share']:.1%}" if staged else "–",
                f"{digits(case['score_ms'], 2)} ms" if staged else "–",
            ]
        )
    return rows


SPEED = ["", "removed", "head", "unpruned", "pruned", "speed-up", "limit", "stage", "of it the score"]


def speed_cuda() -> str:
    name = "pruning_speed_cuda.json"
    document = read(name)
    half = [case for case in document["cases"] if case["schedule"].startswith("half")]
    large = [case for case in half if case["batch"] == 64]
    singles = [case for case in half if case["batch"] == 1]
    times = next(case for case in large if case["pixels"] == 518)["attention_ms"]
    faster = sum(case["speedup"] >= 1 for case in singles)
    words = {0: "is slower pruned", len(singles): "is not slower pruned"}.get(faster, "gains at one of the sizes alone")
    alone = [(case, same) for case in document["cases"] if case["schedule"].startswith("nothing")
             for same in singles if same["pixels"] == case["pixels"]]  # fmt: skip
    blocks = [
        f"- Part of that is one product for queries, keys and values: with nothing removed, the package's blocks take "
        f"one image of {case['pixels']} px at {case['speedup']:.2f}× (class row alone in the last block), and pruned "
        f"at {same['speedup']:.2f}×."
        for case, same in alone
    ]
    return joined(
        f"**{document['model']}, {document['dtype'].removeprefix('torch.')}:**",
        table(SPEED, speed_rows(document)),
        source(name),
        [
            said(min(case["speedup"] for case in large) > 1.2, "Batches of 64 gain at both sizes."),
            f"- One image at a time {words}.",
            *blocks,
            *aims(document, times["sizes"] / times["plain"] - 1),
            f"- Attention of one block on the half that is left, 64 images of 518 px: {digits(times['sizes'])} ms with "
            f"sizes, {digits(times['plain'])} ms without, {times['sizes'] / times['plain'] - 1:+.0%}.",
        ],
    )


def aims(document: dict[str, Any], more: float) -> list[str]:
    """Say of each aim whether it was reached; ``more``: how much longer attention with sizes takes."""
    half = {(c["pixels"], c["batch"]): c for c in document["cases"] if c["schedule"].startswith("half")}
    wanted = [
        *((f"{pixels} px, batch {batch}", half[pixels, batch]["speedup"], aim)
          for (pixels, batch), aim in {(518, 64): 1.48, (224, 64): 1.40, (518, 1): 1.0, (224, 1): 1.0}.items()),
        *((f"half the time at 224 px, batch 64, by {c['schedule']}", c["speedup"], 1.9)
          for c in document["cases"] if c["size"] is not None),
    ]  # fmt: skip
    told = [f"- Aimed at {aim:g}× or more, {what}: {got:.3f}×, {reached(got >= aim)}." for what, got, aim in wanted]
    share = half[518, 64]["stage_share"]
    told.append(f"- Aimed at a stage of at most 4% at 518 px, batch 64: {share:.1%}, {reached(share <= 0.04)}.")
    told.append(
        f"- Aimed at attention with sizes at most 30% slower than without, if possible 10%: {more:+.0%}, "
        f"{reached(more <= 0.3)} and {reached(more <= 0.1)}."
    )
    return told


def reached(whether: bool) -> str:
    return "reached" if whether else "missed"


def speed_cpu() -> str:
    name = "pruning_speed_cpu.json"
    document = read(name)
    return joined(
        f"**{document['model']}, {document['dtype'].removeprefix('torch.')}:**",
        table(SPEED, speed_rows(document)),
        source(name),
        *[f"Like against like, within the quartiles of both: {told}." for told in [like_with_like(document)] if told],
        [
            f"- Aimed at 1.35× or more, {case['pixels']} px, batch {case['batch']}, {form}: {ratio:.3f}×, "
            f"{reached(ratio >= 1.35)}."
            for case in document["cases"]
            for form, ratio in case.get("by_form", {}).items()
        ],
    )


def like_with_like(document: dict[str, Any]) -> str:
    """Say each form's speed-up, and between what bounds the quartiles of both times put it; nothing for older files."""
    parts = []
    for case in document["cases"]:
        run = case["schedule"] + ("" if case["head"] is None else f", head {case['head']}")
        for form, ratio in case.get("by_form", {}).items():
            before, after = case["quartiles"][f"unpruned: {form}"], case["quartiles"][f"{run}: {form}"]
            bounds = f"{before[0] / after[1]:.2f} to {before[1] / after[0]:.2f}"
            parts.append(f"{case['pixels']} px, batch {case['batch']}, {form} {ratio:.2f}× ({bounds})")
    return "; ".join(parts)


BLOCKS = {
    "pruning-cls": cls,
    "pruning-knn": knn,
    "pruning-cls-heads": small_heads,
    "pruning-cls-choices": choices_cls,
    "pruning-planner": planner,
    "pruning-precision": precision,
    "pruning-depth": depth,
    "pruning-saliency": saliency,
    "pruning-dense-heads": dense_heads,
    "pruning-dense-choices": choices_dense,
    "pruning-schedules-depth": schedules_depth,
    "pruning-schedules-saliency": schedules_saliency,
    "pruning-speed-cuda": speed_cuda,
    "pruning-speed-cpu": speed_cpu,
}
