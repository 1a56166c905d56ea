"""The embedded models: how good they are, what their importance maps look at, and how fast scenes are drawn."""

from __future__ import annotations

from typing import Any

from .common import digits, joined, pm, read, said, source, span, table

SCENES, IMPORTANCE = "tiny_scenes_evaluation.json", "tiny_scenes_importance.json"
VIEWS = ("tiny_views_evaluation.json", "tiny_views_evaluation_16views.json")
SCENE_COLUMNS = ["held-out scenes", "depth from", "δ1 ↑", "AbsRel ↓", "AbsRel in metres ↓", "k-NN top-1 ↑"]
VIEW_COLUMNS = [
    "views",
    "from",
    "rotation ° ↓",
    "translation ° ↓",
    "depth δ1 ↑",
    "AbsRel ↓",
    "δ1, no scaling ↑",
    "point error ↓",
]
GUESSES = ("mean depth of the pixel", "mean depth of the row")


def scene_rows(guesses: bool) -> list[list[str]]:
    rows = []
    for ranges, scores in read(SCENES)["ranges"].items():
        for name, depth in scores["depth"].items():
            own = name == "tiny-scenes"
            if own or guesses:
                cells = [pm(depth[column], 3) for column in ("delta1", "abs_rel", "raw_abs_rel")]
                rows.append([ranges if own else "", name, *cells, pm(scores["knn_top1"], 3) if own else ""])
    return rows


def scenes() -> str:
    document = read(SCENES)
    ranges = document["ranges"]

    def value(place: str, name: str, column: str) -> dict[str, float]:
        found: dict[str, float] = ranges[place]["depth"][name][column]
        return found

    inside, net = "training ranges", "tiny-scenes"
    shares = [
        value(inside, net, column)["mean"] / min(value(inside, guess, column)["mean"] for guess in GUESSES)
        for column in ("abs_rel", "raw_abs_rel")
    ]
    scale = {place: value(place, net, "log_scale") for place in ranges}
    textures = "textures shifted"
    worse = value(textures, net, "raw_abs_rel")["mean"] > value(textures, GUESSES[0], "raw_abs_rel")["mean"]
    counts = document["scenes"]
    return joined(
        table(SCENE_COLUMNS, scene_rows(guesses=True)),
        source(SCENES),
        f"{counts['queries']} held-out scenes a row, no sky, mean ± standard error over scenes. δ1 and AbsRel are "
        "after median "
        "scaling, “in metres” is as predicted. The two guesses do not see the picture: they are geometric means over "
        "the "
        f"{counts['bank']:,} scenes of the bank, in which the k-NN votes too (k = 20, chance "
        f"{document['chance_top1']:.3f}).",
        [
            said(
                shares[0] < 0.2 and shares[1] < 0.3 and abs(scale[inside]["mean"]) < 2 * scale[inside]["se"],
                f"Within its ranges the network has {shares[0]:.2f} of the error of a guess, {shares[1]:.2f} in "
                "metres, and its scale is right on "
                f"average (median depth over true median: log {pm(scale[inside], 3)}).",
            ),
            said(
                worse and scale["camera heights shifted"]["mean"] < 0 < scale[textures]["mean"],
                "Each shift moves its scale: high cameras make scenes too near (log "
                f"{pm(scale['camera heights shifted'], 3)}), strange "
                f"textures too far ({pm(scale[textures], 3)}); there depth in metres is worse than the mean depth of "
                "the pixel. With both "
                f"the errors nearly cancel ({pm(scale['both shifted'], 3)}), so that row's figure in metres is luck, "
                "not skill.",
            ),
            said(
                ranges[textures]["knn_top1"]["mean"] < ranges["camera heights shifted"]["knn_top1"]["mean"],
                "The class embedding depends on textures more than on cameras.",
            ),
        ],
    )


def importance() -> str:
    document = read(IMPORTANCE)
    facts = list(dict.fromkeys(row["fact"] for row in document["correlations"]))
    found = {
        (row["scale"], row["layer"], row["fact"]): row
        for row in document["correlations"]
        if (row["patches"], row["directions"]) == ("patches without sky", "rank 20")
    }

    def cell(row: dict[str, Any]) -> str:
        return f"{row['rho']['mean']:+.2f} ± {row['rho']['se']:.2f} ({row['rho_of_other_scenes']:+.2f})"

    rows = [
        [scale, f"L{layer:02d}", *(cell(found[scale, layer, fact]) for fact in facts)]
        for scale in ("metres", "log metres")
        for layer in (2, 5, 8)
    ]
    own = [row for (_, _, fact), row in found.items() if fact != "distance"]
    at = [found["log metres", 5, fact]["gain"] for fact in ("depth step", "objects")]
    place = [found["log metres", layer, "distance"]["p_other_scenes"] for layer in (2, 5, 8)]
    captured = [row["captured"]["mean"] for row in document["overview"]]
    ranks = [row["rho_of_rank_20_with_all_directions"]["mean"] for row in document["overview"]]
    strongest = {row["layer"]: row["energy_of_the_strongest_patch"]["mean"] for row in document["overview"]}
    return joined(
        table(["sensitivity of", "layer", *facts], rows),
        source(IMPORTANCE),
        f"Spearman's ρ over the patches without sky ({100 * document['patches_without_sky']:.0f} % of them) of "
        f"{document['scenes']} held-out "
        "scenes, mean ± standard error over scenes. In brackets: the same with the maps of *other* scenes, which know "
        "where things "
        "usually are, but not where they are here.",
        [
            said(
                all(row["p_other_scenes"] <= 1e-4 for row in own),
                "Maps follow depth steps and objects of their own scene: at layer 5 (log metres) ρ is ahead of other "
                "scenes' maps by "
                f"{pm(at[0], 3)} for depth steps and {pm(at[1], 3)} for objects. For both facts, both scales and all "
                "layers none of "
                "9,999 random deals of maps to scenes did as well.",
            ),
            said(
                min(place) > 0.1,
                "Much of the correlation is place alone, and importance in metres is above all distance: an error in "
                "proportion costs more "
                "metres far away. In log metres, distance says no more than the usual place does (p of the gain "
                f"{span(place)}).",
            ),
            said(
                min(captured) > 0.9,
                f"Truncation hides nothing here: κ(20) is {span(captured, 3)}, and all directions rank the patches as "
                "rank 20 does (ρ at least "
                f"{min(ranks):.3f}).",
            ),
            said(
                strongest[2] > strongest[8] > 0.01,
                f"A single patch carries {100 * strongest[2]:.0f} % of the patches' energy at layer 2 and "
                f"{100 * strongest[8]:.0f} % at layer 8, where "
                "an even share would be 0.4 %.",
            ),
        ],
    )


def rendering() -> str:
    names = ["scenes_cpu.json", "scenes_cuda.json"]
    rows = []
    for name in names:
        found = read(name)
        rates = [digits(found[key]) for key in ("images_per_second", "slowest", "fastest")]
        rows.append([found["machine"]["device"], f"{found['batch']:,}", rates[0], f"{rates[1]} to {rates[2]}"])
    header = [f"scenes of {read(names[0])['size']} px", "at once", "images/s", "slowest to fastest round"]
    return joined(table(header, rows), source(*names))


def view_rows(guesses: bool) -> list[list[str]]:
    rows = []
    for name in VIEWS:
        for views, scores in read(name)["views"].items():
            for who, parts in scores.items():
                if who == "tiny-views" or guesses:
                    angles = [
                        f"{parts[key]['median']:.2f} ± {parts[key]['se']:.2f}" for key in ("rotation", "translation")
                    ]
                    means = [pm(parts[key], 3) for key in ("delta1", "abs_rel", "raw_delta1", "point_error")]
                    rows.append([views if who == "tiny-views" else "", who, *angles, *means])
    return rows


def views() -> str:
    documents = [read(name) for name in VIEWS]
    found = {key: scores for document in documents for key, scores in document["views"].items()}
    shares = {
        key: [own["tiny-views"][key][kind] / own["the mean"][key][kind] for own in found.values()]
        for key, kind in (("rotation", "median"), ("translation", "median"), ("point_error", "mean"))
    }
    drift = max(
        abs(own["tiny-views"]["delta1"]["mean"] - own["tiny-views"]["raw_delta1"]["mean"]) for own in found.values()
    )
    return joined(
        table(VIEW_COLUMNS, view_rows(guesses=True)),
        source(*VIEWS),
        f"{documents[0]['scenes']} held-out scenes a row ({documents[1]['scenes']} with 16 views). Angles are of all "
        "pairs of views: the "
        "median and its bootstrap error over scenes; all else is mean ± standard error over scenes, no sky. “The mean” "
        "does not see "
        "the pictures: mean relative poses, mean depth and mean point of each pixel of each view, from as many other "
        "scenes.",
        [
            said(
                max(shares["rotation"]) < 0.1 and max(shares["point_error"]) < 0.2,
                f"Against a blind guess rotations have {span(shares['rotation'])} of the error, directions of "
                "translation "
                f"{span(shares['translation'])}, points {span(shares['point_error'])}, also with 16 views, which "
                "training never showed.",
            ),
            said(drift < 0.002, "The scale is learnt too: without median scaling δ1 is the same."),
        ],
    )


def training() -> str:
    """The length of the two training runs, from their logs."""
    scenes, views = read("tiny_scenes_training.jsonl"), read("tiny_views_training.jsonl")
    return (
        f"The log of `tiny-scenes` ends at step {scenes[-1]['step']:,}, that of `tiny-views` at step "
        f"{views[-1]['step']:,}. Neither is a "
        "measure of speed: the first starts its clock again where the run was resumed, the second includes pauses.\n\n"
        + source("tiny_scenes_training.jsonl", "tiny_views_training.jsonl")
    )


def scenes_card() -> str:
    return table(SCENE_COLUMNS, scene_rows(guesses=False))


def views_card() -> str:
    return table(VIEW_COLUMNS, view_rows(guesses=False))


BLOCKS = {
    "tiny-scenes": scenes,
    "tiny-scenes-importance": importance,
    "tiny-scenes-card": scenes_card,
    "rendering": rendering,
    "tiny-views": views,
    "tiny-views-card": views_card,
    "training-logs": training,
}
