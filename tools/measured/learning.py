"""Importance heads and the Spectral Pullback Network."""

from __future__ import annotations

from typing import Any

from .common import joined, read, said, signed, source, span, table

CLS, DROPOUT = "layer_heads_cuda.json", "layer_heads_L03_cuda.json"
CLIP = "heads_clip_projection_cuda.json"
REFINED, FRESH = "head_dinov2s_cls_L10_refined_cpu.jsonl", "head_dinov2s_cls_L10_cpu.jsonl"
PAPER_HEAD = {"cls": "0.998 (DINOv2-B)", "dense": "0.20 (imp*), 0.09 (block norms)"}
"""Spearman's ρ that the paper states: abstract for CLS at L10, appendix E for DPT depth at L4."""


def name_of(key: str) -> tuple[str, str]:
    """ "3-256x2" is layer L3 and size 256 × 2."""
    layer, _, size = key.partition("-")
    width, _, rounds = size.partition("x")
    return f"L{layer}", f"{width} × {rounds or 1}"


def rho(found: dict[str, float]) -> str:
    return f"{found['rho']:.3f} ± {found['rho_se']:.3f}"


def heads() -> str:
    document = read(CLS)
    rows, seen = [], set()
    for key, head in document["heads"].items():
        layer, size = name_of(key)
        base = document["baselines"][f"L{int(layer[1:]):02d}"]
        first = [rho(base["mean map"]), f"{base['block norms themselves']['rho']:.3f}"]
        cells = [f"{head['parameters']:,}", rho(head["importance"]), f"{head['importance']['rho_patches']:.3f}"]
        rows.append([layer, size, *cells, *(first if layer not in seen else ["", ""])])
        seen.add(layer)
    value = {key: head["importance"]["rho"] for key, head in document["heads"].items()}
    early, middle = (value[f"{layer}-256x2"] - value[f"{layer}-256"] for layer in (3, 6))
    header = ["layer", "width × rounds", "parameters", "ρ, all tokens", "patches"]
    last = document["curve"][-1]
    drift = max(abs(last[f"{key}/rho"] - head["importance"]["rho"]) for key, head in document["heads"].items())
    options = document["options"]
    return joined(
        table([*header, "mean training map", "block norms themselves"], rows),
        source(CLS),
        f"{options['steps']:,} steps of {options['batch']} on {last['targets']:,} varied crops of "
        f"{document['training_images']:,} ImageNet images; block norms of the three layers together at "
        f"{document['targets_per_second']:,.0f} crops/s. {document['held_out_images']} held-out images, ± over images.",
        [
            said(
                early > middle > 0,
                f"A second round of attention adds {early:.3f} at L3 and {middle:.3f} at L6: early layers need more of "
                "a head.",
            ),
            said(
                drift < 0.002,
                "Which checkpoint is kept was chosen on the held-out images. At the last step, chosen by nothing, "
                "every ρ is "
                f"within {drift:.3f} of the table. The loss, the hints and the second round were chosen on them too.",
            ),
        ],
    )


def clip() -> str:
    """The heads that come with the package for CLIP, and how they came to be as good as they are."""
    document = read(CLIP)
    steps = [str(row["step"]) for row in document["curve"]]
    rows, gained = [], []
    for name, head in document["heads"].items():
        found = [row[f"{name}/rho"] for row in document["curve"]]
        gained.append(found[-1] - found[-2])
        cost = f"{100 * head['operations_share']:.2g} %"
        rows.append([name, rho(head), f"{head['rho_patches']:.3f}", cost, *(f"{value:.3f}" for value in found)])
    values = [head["rho"] for head in document["heads"].values()]
    last = all(head["best_step"] == document["steps"] for head in document["heads"].values())
    parameters = {head["parameters"] for head in document["heads"].values()}
    header = ["layer", "ρ, all tokens", "patches", "cost", *(f"after {step} steps" for step in steps)]
    return joined(
        table(header, rows),
        source(CLIP),
        f"{document['steps']} steps on varied crops of {document['training_images']:,} photographs, heads of "
        f"{min(parameters):,} parameters, judged by {document['held_out_images']} photographs, ± over them; the first "
        "two columns are of the weights in float16, as they come. Cost is the share of the operations of all blocks.",
        [
            said(len(parameters) == 1 and values == sorted(values), "The later the layer, the better its head."),
            said(
                last and 0 < max(gained) < 0.005,
                f"The last quarter of the steps brought at most {max(gained):.3f}. The step that is kept was chosen on "
                "the photographs that judge; it is the last for every layer.",
            ),
        ],
    )


def dropout() -> str:
    document = read(DROPOUT)
    rows, gaps = [], []
    for key, head in document["heads"].items():
        other = [head[name]["rho"] for name in ("block norms", "block norms of training images")]
        gaps.append(other[1] - other[0])
        cells = [f"{head['parameters']:,}", rho(head["importance"]), f"{head['importance']['rho_patches']:.3f}"]
        rows.append([name_of(key)[1], *cells, *(f"{value:.3f}" for value in other)])
    header = ["L3, width × rounds", "parameters", "ρ, all tokens", "patches", "block norms"]
    options, best = document["options"], max(head["importance"]["rho"] for head in document["heads"].values())
    before = read(CLS)["heads"]
    with_it, without = document["heads"]["3-512x2"]["importance"]["rho"], before["3-512x2"]["importance"]["rho"]
    small = document["heads"]["3-256x2"]["importance"]["rho"], before["3-256x2"]["importance"]["rho"]
    return joined(
        table([*header, "block norms of training images"], rows),
        source(DROPOUT),
        f"{options['dropout']:.0%} of the entries of the features dropped, weight decay {options['weight_decay']}, "
        f"{options['steps']:,} steps.",
        [
            said(
                with_it > without and small[0] < small[1],
                f"Dropout helps the large heads (512 × 2: {with_it:.3f}, {without:.3f} without) and not the small one "
                f"(256 × 2: {small[0]:.3f}, {small[1]:.3f} without).",
            ),
            said(best > 0.79, f"{best:.3f} is the best ρ at L3 so far."),
            said(
                min(gaps) > 0.05,
                f"Every head does better by {span(gaps)} on images that it was trained on.",
            ),
        ],
    )


def curve() -> str:
    lines = read(CLS)["curve"]
    keys = ["3-256", "3-512", "3-256x2", "6-256", "6-256x2", "10-256"]
    rows = [[", ".join(name_of(key)), *(f"{line[f'{key}/rho']:.3f}" for line in lines)] for key in keys]
    header = ["crops", *(f"{line['targets'] / 1000:.0f} k" for line in lines)]
    gains = [lines[-1][f"{key}/rho"] - lines[-3][f"{key}/rho"] for key in keys]
    end = lines[-1]
    return joined(
        table(header, rows),
        source(CLS),
        [
            said(
                max(gains) < 0.002 and end["3-256x2/rho"] > end["3-512/rho"] > end["3-256/rho"],
                "The curves end flat while larger heads lie higher, and at L3 a second round of attention brings more "
                "than "
                "twice the width. One run and one seed, so the learning rate falls along each row.",
            )
        ],
    )


def refined() -> str:
    best, fresh = (max(read(name), key=lambda line: line["rho"]) for name in (REFINED, FRESH))
    start = read(CLS)["heads"]["10-256"]["importance"]
    rows = [
        ["block norms of varied crops (the L10 row above)", rho(start), f"{start['rho_patches']:.3f}"],
        ["the same, then imp* of 2,000 plain images", rho(best), f"{best['rho_patches']:.3f}"],
        ["imp* of 2,000 plain images from a random head", rho(fresh), f"{fresh['rho_patches']:.3f}"],
        [f"*the paper: {PAPER_HEAD['cls']}*", "", ""],
    ]
    return joined(
        table(["L10, 256 × 1, trained on", "ρ against imp*", "patches"], rows),
        source(REFINED, FRESH),
        [said(best["rho"] > start["rho"] > fresh["rho"], "Many cheap targets first, the exact ones last, is best.")],
    )


def ablations() -> str:
    name = "head_ablations_cpu.jsonl"
    lines = read(name)
    rows = []
    for title, label in (("E.2", "weight of the ranking term"), ("E.3", "size"), ("E.4", "training images")):
        own = [line for line in lines if line["ablation"] == title]
        words = "; ".join(f"{line['variant']}: {line['rho']:.4f}" for line in own)
        rows.append([f"{title}, {label}", words])
    found = {line["variant"]: line["rho"] for line in lines}
    spread = abs(found["w_rank 1"] - found["w_rank 0"])
    errors = span((line["rho_se"] for line in lines), 4)
    return joined(
        table(["the paper's ablation", "ρ over all tokens"], rows),
        source(name),
        f"{lines[0]['steps']} steps of {lines[0]['batch']} from a random head, seed {lines[0]['seed']}; the standard "
        "error over "
        f"images is {errors}. Far from converged, so these compare and say no more.",
        [
            said(
                spread < 0.002 and abs(found["2 heads"] - found["8 heads"]) < 0.001,
                "The weight of the ranking term and the number of attention heads hardly matter, as in the paper "
                "(which reports degradation under pruning, not ρ).",
            ),
            said(found["width 512"] > found["width 256, 4 heads"] + 0.002, "Width does matter, beyond 256 too."),
            said(
                found["2000 images"] - found["250 images"] < 0.005,
                f"Eight times the images bring {found['2000 images'] - found['250 images']:.4f} at this length of "
                "training.",
            ),
        ],
    )


def dense() -> str:
    files = {
        "saliency on its DINOv2-S": "heads_saliency_L04_cuda.json",
        "the same, another run": "heads_saliency_L04_refined_cuda.json",
        "`tiny-scenes`, `depth-8x8`": "heads_tiny_scenes_L04_cuda.json",
    }
    rows, found = [], {}
    for title, name in files.items():
        document = read(name)
        base = document["baselines"]["L04"]
        for key, head in document["heads"].items():
            again = key.endswith("refined")
            pictures = min(document["options"]["refine_pictures"], document["training_images"])
            trained = f"then imp* of {pictures:,} crops" if again else "block norms"
            known = [f"{base[own]['rho']:.3f}" for own in ("mean map", "block norms themselves")]
            images = f"{document['held_out_images']}"
            measured = [rho(head["importance"]), f"{head['block norms']['rho']:.3f}"]
            rows.append(["" if again else title, trained, images, *measured, *(["", ""] if again else known)])
            found[title, again] = head["importance"]["rho"]
    header = ["L4", "trained on", "held-out images", "ρ against imp*", "against block norms", "mean training map"]
    crops = read(files["saliency on its DINOv2-S"])["curve"][-1]["targets"]
    changes = [found[title, True] - found[title, False] for title in list(files)[1:]]
    return joined(
        table([*header, "block norms against imp*"], rows),
        source(*files.values()),
        f"640 steps of 256 on {crops:,} varied crops, width 256, one round, seed 0. The paper states "
        f"{PAPER_HEAD['dense']} for "
        "DPT depth at L4.",
        [
            said(
                min(found.values()) > 0.8,
                "The paper finds that dense decoders defy a head. These two do not: both targets are learnt. The "
                "decoders "
                "differ, and so does the number of targets (the paper's heads saw at most 4,000 images).",
            ),
            said(
                changes[0] < 0 < changes[1],
                f"Going on with imp* adds {changes[1]:.3f} on depth and takes {-changes[0]:.3f} on saliency.",
            ),
        ],
    )


LABELS = {"distances": "distances of outputs", "directions": "random directions", "random init": "random network"}
CONSTANT = "best constant subspace"


def network_row(row: dict[str, Any], suffix: str = "") -> list[str]:
    cells = [LABELS.get(row["network"], row["network"]) + suffix]
    for name in ("v1", "v1_patches"):
        lead = signed(row[f"{name}_lead"], row[f"{name}_lead_half_width"], 4)
        cells += [f"{row[name]:.3f}", "" if row["network"] == CONSTANT else lead]
    return [*cells, f"{row['natural_ratio']:.3f}" if "natural_ratio" in row else ""]


NETWORKS = ["V₁", "lead", "V₁, patches", "lead", "natural ratio"]


def spn_cls() -> str:
    name = "spn_dinov2-small_cls_L10_cuda.json"
    document = read(name)
    found = {row["network"]: row for row in document["rows"]}
    taught = [found[key] for key in ("RandNLA q=1", "RandNLA q=2", "Spectral")]
    naive = [found[key] for key in ("distances", "directions", "random init")]
    gaps = [found["Spectral"]["v1"] - found[key]["v1"] for key in ("RandNLA q=1", "RandNLA q=2")]
    title = f"DINOv2-S CLS L10, κ({document['options']['rank']}) = {document['kappa']:.2f}"
    shares = [row["v1_patches"] / found[CONSTANT]["v1_patches"] for row in taught]
    return joined(
        table([title, *NETWORKS], [network_row(row) for row in document["rows"]]),
        source(name),
        f"{document['options']['steps']:,} steps of {document['options']['batch']} for each, products in "
        f"{document['options']['precision']}, {document['held_out_images']} held-out images.",
        [
            said(
                all(row["v1_lead"] > 2 * row["v1_lead_half_width"] for row in taught),
                f"Networks taught by power iteration come within {gaps[0]:.3f} (q = 1) and {gaps[1]:.3f} (q = 2) of "
                "exact modes, "
                "as the paper says, and all three are ahead of the constant subspace outside its interval.",
            ),
            said(
                max(row["v1_lead"] for row in taught) < 0.03 and min(shares) > 2,
                "The lead over all tokens is small, because most of V₁ comes from the class token's block, which is "
                "nearly the same "
                f"subspace for every image. On patches the networks find {span(shares, 1)} times what a constant "
                "finds.",
            ),
            said(
                max(row["v1"] for row in naive) < 0.002,
                "The naive supervisions stay where a random network is, as the paper says.",
            ),
        ],
    )


def spn_depth() -> str:
    names = ["spn_tiny-scenes_depth-8x8_L04_cuda.json", "spn_tiny-scenes_depth-8x8_L04_from_constant_cuda.json"]
    first, second = map(read, names)
    later = [row for row in second["rows"] if row["network"] not in (CONSTANT, "random init")]
    rows = [network_row(row) for row in first["rows"]] + [network_row(row, ", from the constant") for row in later]
    title = f"`tiny-scenes` `depth-8x8`, L4, κ({first['options']['rank']}) = {first['kappa']:.2f}"
    taught = [row for row in first["rows"] if row["network"] not in (CONSTANT, "random init")]
    return joined(
        table([title, *NETWORKS], rows),
        source(*names),
        f"{first['options']['steps']} steps of {first['options']['batch']}, products in "
        f"{first['options']['precision']}, "
        f"{first['held_out_images']} held-out scenes.",
        [
            said(
                all(row["v1_lead"] < -row["v1_lead_half_width"] for row in taught)
                and all(row["v1_lead"] > row["v1_lead_half_width"] for row in later),
                "From a random start all networks stay behind the constant subspace; started there, both end ahead of "
                "it.",
            ),
            said(
                max(row["v1"] for row in [*taught, *later]) < 0.1,
                "Either way nothing predicts these modes well, although 20 of them carry nearly all of |J|². More "
                "steps were not "
                "tried; the naive supervisions were not run on this decoder.",
            ),
        ],
    )


BLOCKS = {
    "heads": heads,
    "heads-clip": clip,
    "heads-dropout": dropout,
    "heads-curve": curve,
    "heads-refined": refined,
    "heads-ablations": ablations,
    "heads-dense": dense,
    "spn-cls": spn_cls,
    "spn-depth": spn_depth,
}
