"""VGGT: diagnosis, cameras, the SPN on a camera, and many views on fewer tokens."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from pullback.report.wording import lower_bound, plain, plus_minus, regime_label

from .common import joined, pm, read, said, signed, source, span, table

Row = dict[str, Any]


def full_size() -> str:
    name = "vggt_full_cuda.json"
    document = read(name)
    rows = []
    for row in document["rows"]:
        place = "x_vis" if row["layer"] == "hooks" else f"L{row['layer']}"
        products = f"{row['jvps per scene']} JVP, {row['vjps per scene']} VJP"
        times = [f"{row['diagnosis s']:.1f} s", f"{row['jvp ms']:.1f}, {row['vjp ms']:.1f} ms"]
        memory = f"{row['peak GB']:.1f} GB"
        rows.append([f"{row['decoder']} {place}", f"{row['outputs']:,}", products, *times, memory])
    peak = max(row["peak GB"] for row in document["rows"])
    _, views, _, height, _ = document["images"]
    return joined(
        table(["head", "M", "products", "diagnosis", "JVP, VJP each", "peak memory"], rows),
        source(name),
        f"{document['parameters'] / 1e9:.2f} billion random parameters, one scene of {views} views of {height} px, "
        "rank "
        f"{document['rank']}; memory includes the weights.",
        [
            said(peak < 24, "All of it fits into 24 GB."),
            said(
                all((row["method"] == "exact") == (row["decoder"] != "depth") for row in document["rows"]),
                "Cameras and points are exact, from all rows of J; the depth map takes a Krylov space. How soon that "
                "converges depends on "
                "the weights.",
            ),
        ],
    )


TAXONOMY = "scene_taxonomy_tiny_views_cuda.jsonl"
COLUMNS = {
    "M": (None, lambda row: str(row["output_size"])),
    "κ(20) %": ("kappa", lambda row: plus_minus(row["kappa"], row["kappa_se"], scale=100)),
    "κ(50) %": ("kappa_50", lambda row: plus_minus(row.get("kappa_50"), row.get("kappa_50_se"), scale=100)),
    "r_eff": ("r_eff_slq", lambda row: plus_minus(row["r_eff_slq"], row["r_eff_slq_se"])),
    "r_0.90": ("r90", lambda row: lower_bound(row["r90"])),
    "CV (null)": ("cv", lambda row: f"{plain(row['cv'])} ({plain(row['cv_null'], 2)})"),
    "K_eff": ("k_eff", lambda row: plus_minus(row.get("k_eff"), row.get("k_eff_se"))),
    "rank J": (None, lambda row: rank_of(row.get("jacobian_rank"))),
    "regime": ("regime", regime_label),
    "products": (None, lambda row: f"{sum(row['products']['total'].values()) / row['scenes']:,.0f}"),
}


def rank_of(found: Row | None) -> str:
    if found is None:
        return "–"
    least, most = found["least"], found["most"]
    return f"{least} of {found['bound']}" if least == most else f"{least}–{most} of {found['bound']}"


def stated(paper: Row, name: str | None) -> str:
    value = None if name is None else paper.get(name)
    if value is None:
        return ""
    scale = 100 if name in ("kappa", "kappa_50") else 1
    return value if isinstance(value, str) else f"{scale * value:.4g}"


def taxonomy() -> str:
    measured = read(TAXONOMY)
    rows = []
    for row in measured:
        place = "x_vis" if row["layer"] is None else f"L{row['layer']:02d}"
        rows.append([f"{row['decoder']} {place}", *(cell(row) for _, cell in COLUMNS.values())])
        if row["paper"] is not None:
            where = f"L{row['paper']['layer']:02d}" if "layer" in row["paper"] else "x_vis"
            rows.append([f"*paper, {where}*", *(stated(row["paper"], name) for name, _ in COLUMNS.values())])
    at = {(row["decoder"], row["layer"]): row for row in measured}
    camera, points, depth = at["camera-1", 4], at["points", 4], at["depth", 4]
    points_at, depth_at = at["points", None], at["depth", None]
    factor = [at[name, None]["cv"] / at[name, 4]["cv"] for name in ("points", "depth-8x8", "depth")]
    first = measured[0]
    return joined(
        table(["probe", *COLUMNS], rows),
        source(TAXONOMY),
        f"{first['scenes']} scenes of {first['views']} views of {first['size']} px, mean ± standard error over scenes, "
        "seed "
        f"{first['seed']}; products are per scene.",
        [
            said(
                all(row["regime"] == "iv" for row in measured if row["decoder"].startswith("camera")),
                "**Camera.** Regime (iv), as in the paper: the rank of J, counted in float64, is 9 a view, so κ(20) is "
                "1. A full spectrum is "
                f"not a flat one: the effective rank of one camera is {camera['r_eff_slq']:.1f} of 9. The paper prints "
                "9, the bound.",
            ),
            said(
                points["regime"] == "ii" and depth["regime"] == "iii",
                "**Points and depth at a middle layer** are not rich here. The paper puts both into regime (i); on "
                "`tiny-views` 20 directions "
                f"capture {100 * points['kappa']:.0f} % for points, regime ({regime_label(points)}), and "
                f"{100 * depth['kappa']:.0f} % for full depth maps, regime (iii).",
            ),
            said(
                depth_at["r_eff_slq"] > 2 * depth["r_eff_slq"] and points_at["r_eff_slq"] < points["r_eff_slq"],
                "**One layer against four.** The paper finds spectra at x_vis beyond any rank budget and layers that "
                "are nearly orthogonal. "
                f"Full depth maps go the same way, less far: effective rank {depth_at['r_eff_slq']:.0f} at x_vis "
                "against "
                f"{depth['r_eff_slq']:.0f} at L04, K_eff {depth_at['k_eff']:.1f} of 4. Points need fewer directions at "
                "x_vis than at L04.",
            ),
            said(
                min(factor) > 2,
                f"CV is larger at x_vis than at L04, {span(factor, 1)} times; the paper reports the same of Depth "
                "Anything. (At x_vis a "
                "camera reads one token a view, so its CV says no more than that.)",
            ),
            "- With 64 points M is 192, and no effective rank can exceed M. The paper states M = 192 and an effective "
            "rank of 212 for "
            "points; the two cannot be of the same 64 points.",
        ],
    )


def points() -> str:
    name = "vggt_spectra_cpu.json"
    places = [read(name)["means"][f"points {place}"] for place in ("L04", "x_vis")]
    rows = [
        [key.removeprefix("r_eff, "), *(pm(own[key], 1) for own in places)]
        for key in places[0]
        if key.startswith("r_eff, ")
    ]
    shares = [own["energy of the strongest 5"] for own in places]
    sky = places[1]["share of sky points"]["mean"], places[1]["energy of sky points"]
    alike = [own["r_eff, every point alike"]["mean"] for own in places]
    return joined(
        table(["effective rank of points", "L04", "x_vis"], rows),
        source(name),
        [
            said(
                alike[1] > alike[0],
                f"A few points carry nearly all of the sensitivity: the strongest 5 of 64 hold {pm(shares[1], 0, 100)} "
                "% of |J|² at x_vis "
                f"and {pm(shares[0], 0, 100)} % at L04. Give every point the same weight and the order is the paper's.",
            ),
            "- Part of it is distance, since the head's activation makes far points move more (rank correlation of "
            "energy and "
            f"distance {pm(places[1]['Spearman of energy and distance, no sky'], 2)}). The sky, where nothing was "
            "learned, is "
            f"{100 * sky[0]:.0f} % of the points and has {pm(sky[1], 0, 100)} % of |J|².",
        ],
    )


def camera_metric() -> str:
    names = [f"camera_metric_tiny_views{part}_cpu.jsonl" for part in ("", "_rank4")]
    wide, narrow = map(read, names)

    def cell(rows: list[Row], key: str, places: int = 3) -> str:
        values = [row[key] for row in rows]
        return f"{mean(values):.{places}f} ± {stdev(values) / len(values) ** 0.5:.{places}f}"

    metrics = [
        ["κ(16)", cell(wide, "kappa_euclidean"), cell(wide, "kappa_so3"), "0.99"],
        ["κ(4)", cell(narrow, "kappa_euclidean"), cell(narrow, "kappa_so3"), "–"],
        ["effective rank", *(cell(wide, f"effective_rank_{key}", 2) for key in ("euclidean", "so3")), "–"],
    ]
    agreement = [
        ["Spearman's ρ", cell(wide, "spearman_all"), cell(wide, "spearman_patches"), "0.995"],
        ["50 % sets agree on", cell(wide, "agreement_all"), cell(wide, "agreement_patches"), "0.97"],
    ]
    parts = read("vggt_spectra_cpu.json")["means"]["camera-1"]
    return joined(
        table(["", "Euclidean", "SO(3)-aware", "paper, both"], metrics),
        table(["the two importances", "all tokens", "patches", "paper"], agreement),
        source(*names),
        f"{len(wide)} scenes of {wide[0]['views']} views, all cameras jointly, mean ± standard error over scenes.",
        [
            said(
                mean(row["spearman_all"] for row in wide) > 0.99,
                "The paper's finding holds: tractability and the ranking of tokens hardly depend on the metric.",
            ),
            f"- Taken apart ({source('vggt_spectra_cpu.json')}: one camera, L04): removing the length of the "
            "quaternion leaves "
            f"ρ = {parts['Spearman, length of the quaternion removed']['mean']:.4f}, doubling the rotations, which is "
            "what radians do to a "
            f"unit quaternion, {pm(parts['Spearman, rotations doubled'], 3)}. The nearly empty ninth direction "
            f"({parts['last over first singular value']['mean']:.3f} of the first singular value) is not the length "
            "but the difference of "
            f"the two fields of view ({parts['last mode along the difference of fields of view']['mean']:.4f} of the "
            "mode), which are equal "
            "in square pictures.",
        ],
    )


CONSTANT = "best constant subspace"


def camera_spn() -> str:
    name = "camera_spn_tiny_views_cuda.json"
    document = read(name)
    rows = []
    for row in document["rows"]:
        cells = []
        for key in ("v1", "v1_patches"):
            lead = signed(row[f"{key}_lead"], row[f"{key}_lead_half_width"], 3)
            cells += [f"{row[key]:.3f}", "" if row["network"] == CONSTANT else lead]
        paper = row["paper_v1_of_compressed_depth"]
        ratio = f"{row['natural_ratio']:.3f} ± {row['natural_ratio_se']:.3f}"
        rows.append([row["network"], *cells, ratio, "" if paper is None else f"{paper:.3f}"])
    found = {row["network"]: row for row in document["rows"]}
    started = [row for row in document["rows"] if row["network"].endswith("from constant")]
    gap = found["Spectral from constant"]["v1"] - min(row["v1"] for row in started)
    settings = document["settings"]
    return joined(
        table(["network", "V₁ ↑", "lead", "V₁, patches ↑", "lead", "natural ratio ↑", "paper*"], rows),
        source(name),
        f"{document['probe']}, {settings['train_scenes']:,} training scenes, {settings['steps']} steps of "
        f"{settings['batch']}, rank "
        f"{document['rank']}, {settings['held_out']} held-out scenes, seed {settings['seed']}. The paper's column is "
        "of another probe, "
        "depth through a VAE; it states no V₁ for cameras.",
        [
            said(
                all(
                    row[f"{key}_lead"] > row[f"{key}_lead_half_width"]
                    for row in started
                    for key in ("v1", "v1_patches")
                ),
                "**Started at the constant subspace** (beyond the paper), every network ends ahead of it, over all "
                "tokens and over patches, and "
                f"RandNLA comes within {gap:.3f} of exact modes.",
            ),
            said(
                all(found[key]["v1_patches_lead"] < 0 for key in ("RandNLA q=1", "Spectral")),
                "From a random start the same steps leave both behind the constant over patches. That RandNLA is then "
                "ahead of exact modes over "
                "all tokens is one seed, and a sign that neither has converged.",
            ),
        ],
    )


VIEWS, WITHIN = "vggt_pruning_tiny-views_16views_cuda.json", "vggt_pruning_tiny-views_16views_within_cpu.json"
CHANGES = ("rotation change deg", "translation change deg", "depth change", "rotation error deg")


def views() -> str:
    result = read(VIEWS)
    known = {(row["ratio"], row["rule"]) for row in result["rows"]}
    added = [row for row in read(WITHIN)["rows"] if (row["ratio"], row["rule"]) not in known]
    rows = []
    for row in [
        {"rule": "none", "ratio": 0, **result["unpruned"]},
        *sorted([*result["rows"], *added], key=lambda r: r["ratio"]),
    ]:
        cells = [
            pm(row[name], 2, 100 if name == "depth change" else 1) if row["rule"] != "none" or "error" in name else "0"
            for name in CHANGES
        ]
        mark = " *" if row in added else ""
        rows.append([f"{row['ratio']:.0%}", row["rule"] + mark, *cells, f"{row['delta1']['mean']:.3f}"])
    header = ["removed", "rule", "rotation ° ↓", "translation ° ↓", "depth % ↓", "error of rotation ° ↓", "δ1 ↑"]
    return joined(
        table(header, rows),
        source(VIEWS) + ", \\* " + source(WITHIN),
        f"{result['scenes']} held-out scenes of {result['timed'][1]} views ({result['tokens']:,} tokens a scene), "
        "removal after global "
        f"block {result['stage']} of 8.",
        view_findings(result),
    )


def view_findings(result: Row) -> list[str]:
    found = {(row["rule"], row["ratio"]): row for row in result["rows"]}
    ratios = sorted({row["ratio"] for row in result["rows"]})
    names = CHANGES[:3]
    ours, theirs = "random, global", "strided merging, global"
    wins = all(
        found[ours, ratio][name]["mean"] < found[theirs, ratio][name]["mean"] for ratio in ratios for name in names
    )
    half = found[ours, 0.5]["more than strided"]
    inside = found["random, view", 0.5]["more than strided"]
    quarter = [found[f"{score}, global", 0.25]["rotation change deg"]["mean"] for score in ("importance", "random")]
    depth = [
        found[f"importance, {scope}", ratio]["depth change"]["mean"]
        >= found[f"random, {scope}", ratio]["depth change"]["mean"]
        for scope in ("global", "view")
        for ratio in ratios
    ]
    norm = all(
        found[f"norm, {scope}", ratio][name]["mean"] >= found[f"random, {scope}", ratio][name]["mean"]
        for scope in ("global", "view")
        for ratio in ratios
        for name in names
    )
    words = (
        f"rotation {signed(half[names[0]]['mean'], half[names[0]]['se'], 2)}°, translation "
        f"{signed(half[names[1]]['mean'], half[names[1]]['se'], 2)}°, depth "
        f"{signed(100 * half[names[2]]['mean'], 100 * half[names[2]]['se'], 2)} %"
    )
    own = result["unpruned"]["rotation error deg"]["mean"], found[ours, 0.5]["rotation change deg"]["mean"]
    return [
        said(
            wins,
            "**`best` with a random score beats strided merging** around global attention in every mean. Paired, at "
            f"half: {words}.",
        ),
        said(
            inside[names[2]]["mean"] + 2 * inside[names[2]]["se"] < 0
            and abs(inside[names[0]]["mean"]) < 2 * inside[names[0]]["se"],
            "Within views it is better for depth ("
            f"{signed(100 * inside[names[2]]['mean'], 100 * inside[names[2]]['se'], 2)} %) and level for cameras "
            f"({signed(inside[names[0]]['mean'], inside[names[0]]['se'], 2)}°), paired, at half.",
        ),
        said(
            own[1] < own[0],
            f"With half of the tokens gone around global attention cameras turn by {own[1]:.1f}°, less than the "
            "network's own error of "
            f"{own[0]:.1f}°.",
        ),
        said(
            quarter[0] < quarter[1] and all(depth),
            "**Importance pays little here.** With the oracle cameras move less at a quarter "
            f"({quarter[0]:.2f}° against {quarter[1]:.2f}° with a random score); depth never gains.",
        ),
        said(norm, "The norm is a poor score of VGGT tokens: never better than a random one."),
    ]


def rules() -> str:
    name = "vggt_rules_tiny-views_cpu.json"
    document = read(name)
    rows, places = [], {(row["scope"], row["score"], row["variant"]): row for row in document["rows"]}
    pairs = dict.fromkeys((row["score"], row["variant"]) for row in document["rows"] if row["scope"] == "view")
    for score, variant in pairs:
        cells = []
        for scope in ("global", "view"):
            row = places.get((scope, score, variant))
            for key, scale in (("rotation change deg", 1), ("depth change", 100)):
                cells.append(pm(row[key], 2, scale) if row else "–")
        label = {"preset": "`best`"}.get(variant, variant) if score == "random" else "strided merging"
        rows.append([label, *cells])
    header = ["variant", "`global`: rotation ° ↓", "depth % ↓", "`view`: rotation ° ↓", "depth % ↓"]
    sizes = all(
        places[scope, "random", "without sizes"]["more than the preset"]["depth change"]["mean"]
        == max(
            row["more than the preset"]["depth change"]["mean"]
            for (own, score, _), row in places.items()
            if own == scope and score == "random"
        )
        for scope in ("global", "view")
    )
    fused = places["view", "random", "fused before the last block"], places["view", "random", "preset"]
    return joined(
        table(header, rows),
        source(name),
        f"{document['scenes']} scenes of {document['views']} views that no other table uses, half of the tokens, a "
        "random score.",
        [
            said(sizes, "Sizes in attention matter most for depth, in both scopes."),
            said(
                fused[0]["rotation change deg"]["mean"] > 1.5 * fused[1]["rotation change deg"]["mean"]
                and fused[0]["depth change"]["mean"] < fused[1]["depth change"]["mean"],
                "Within views, tokens that come back before the last block help the maps a little and make cameras "
                "turn much further.",
            ),
        ],
    )


def costs() -> str:
    small, full = "vggt_pruning_tiny-views_16views_cpu.json", "vggt_pruning_full_32views_518px_cuda.json"
    parts = "vggt_pruning_full_32views_518px_parts_cuda.json"
    documents = [read(name) for name in (small, full, parts)]
    known = [{(row["rule"], row["ratio"]): row for row in document["rows"]} for document in documents]
    bare = [document["unpruned"] for document in documents]
    rows = [
        ["0%", "none", *(f"{own['ms']:,.0f} ms" for own in bare), *(f"{own['peak GB']:.2f} GB" for own in bare[1:])]
    ]
    for rule, ratio in known[0]:
        cells = [f"{own[rule, ratio]['speedup']:.2f}×" if (rule, ratio) in own else "–" for own in known]
        memory = [f"{own[rule, ratio]['peak GB']:.2f} GB" if (rule, ratio) in own else "–" for own in known[1:]]
        rows.append([f"{ratio:.0%}", rule, *cells, *memory])
    header = [
        "removed",
        "rule",
        "tiny-views, 16 views, CPU",
        "full size, 32 views",
        "the same in parts",
        "memory",
        "in parts",
    ]
    slower = all(known[2][key]["speedup"] < known[1][key]["speedup"] for key in known[2])
    ratios = sorted({ratio for _, ratio in known[2]})
    return joined(
        table(header, rows),
        source(small, full, parts),
        f"Full size: random weights, {documents[1]['timed'][1]} views of {documents[1]['timed'][-1]} px "
        f"({documents[1]['tokens']:,} tokens), "
        f"removal after global block {documents[1]['stage']} of 24. Memory is what a call needs beside weights and "
        "images.",
        [
            said(
                slower and ratios == [0.5],
                "The run in parts (at most 16,384 tokens at a time, matching in blocks) was made at half of the tokens "
                "only, and gains less than "
                "the one before; how much of that is the parts and how much the matching was not told apart.",
            ),
            said(
                all(row["peak GB"] > 0.9 * bare[1]["peak GB"] for row in documents[1]["rows"]),
                "Pruning hardly lowers the memory: the peak is in the dense heads, and what they read is whole again.",
            ),
        ],
    )


def many_views() -> str:
    name, small = "vggt_pruning_tiny-views_48views_cpu.json", "vggt_pruning_full_32views_224px_cuda.json"
    document, other = read(name), read(small)
    rows = [["none", f"{document['unpruned']['ms'] / 1000:.1f} s", "", f"{document['unpruned']['peak GB']:.3f} GB"]]
    for row in document["rows"]:
        rows.append([row["rule"], f"{row['ms'] / 1000:.1f} s", f"{row['speedup']:.2f}×", f"{row['peak GB']:.3f} GB"])
    speeds = [row["speedup"] for row in other["rows"]]
    return joined(
        table(
            [
                f"{document['timed'][1]} views of `tiny-views`, {document['rows'][0]['ratio']:.0%} removed",
                "time",
                "speed-up",
                "memory",
            ],
            rows,
        ),
        source(name),
        [
            said(
                max(speeds) < 1.1,
                f"Views of 224 px gain nothing on an H200: {span(speeds)}× for {other['timed'][1]} of them at full "
                "size, at any ratio "
                f"({source(small)}). So few tokens do not fill it.",
            )
        ],
    )


BLOCKS = {
    "vggt-full-size": full_size,
    "vggt-taxonomy": taxonomy,
    "vggt-points": points,
    "vggt-camera-metric": camera_metric,
    "vggt-camera-spn": camera_spn,
    "vggt-pruning": views,
    "vggt-pruning-choices": rules,
    "vggt-pruning-costs": costs,
    "vggt-pruning-memory": many_views,
}
