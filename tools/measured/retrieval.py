"""Distances from features against the decoder's own: the learned metric, baselines, and the line under the Jacobian."""

from __future__ import annotations

from typing import Any

from .common import digits, joined, read, said, source, span, table

RESULT, DEEPER = "retrieval_cuda.json", "retrieval_rounds3_cuda.json"
FIT = "retrieval_fit_cpu.json"
BASELINES = ("l2", "cls-cosine", "mean-cosine")
METHODS = {
    "l2": "L2 of all tokens",
    "cls-cosine": "cosine of class tokens",
    "mean-cosine": "cosine of mean patches",
    "constant": "constant metric ḡ",
    "drm": "DRM",
}
CASES = {"saliency": "saliency", "depth": "depth, DINOv2-S", "scenes": "depth, `tiny-scenes`"}
SETS = {
    "heldout": "ImageNet-val",
    "rgbd": "RGB-D frames",
    "sketch": "sketches",
    "held-out scenes": "held-out scenes",
    "shifted scenes": "shifted scenes",
}
# tab:depth_retrieval_indist and tab:depth_retrieval_cross of the paper: rho, tau, MAE, RMSE
PAPER_IN = {
    "l2": (0.223, 0.153, 11.43, 11.55),
    "cls-cosine": (0.206, 0.139, 0.677, 0.805),
    "drm": (0.783, 0.581, 0.233, 0.289),
}
PAPER_ACROSS = {
    "l2": (0.266, 0.178, 7.77, 7.90),
    "cls-cosine": (0.338, 0.229, 0.627, 0.707),
    "drm": (0.457, 0.312, 0.246, 0.310),
}


def cells(name: str = RESULT) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(name)["cells"]
    return found


def cell(case: str, layer: int, name: str = RESULT) -> dict[str, Any]:
    return next(found for found in cells(name) if (found["case"], found["layer"]) == (case, layer))


def title(found: dict[str, Any]) -> str:
    return f"{CASES[found['case']]}, L{found['layer']}"


def own_set(found: dict[str, Any]) -> str:
    return next(iter(found["sets"]))


def best_of(part: dict[str, Any]) -> str:
    """The best baseline over all pairs."""
    return max(BASELINES, key=lambda name: part["methods"][name]["spearman_pairs"])


def interval(scores: dict[str, float], name: str = "spearman", places: int = 3) -> str:
    return f"{scores[name]:.{places}f} ({scores[f'{name}_low']:.{places}f} to {scores[f'{name}_high']:.{places}f})"


# The paper's tables


def paper() -> str:
    found = cell("depth", 10)
    return joined(
        "In distribution (ImageNet-val), beside the paper's `tab:depth_retrieval_indist`:",
        _in_the_papers_form(found, "heldout", PAPER_IN),
        "Across data (RGB-D frames of rooms), beside its `tab:depth_retrieval_cross`:",
        _in_the_papers_form(found, "rgbd", PAPER_ACROSS),
        source(RESULT),
    )


def _in_the_papers_form(found: dict[str, Any], part: str, known: dict[str, tuple[float, ...]]) -> str:
    header = ["method", "ρ", "paper", "τ", "paper", "MAE", "paper", "RMSE", "paper", "MAE, scaled", "MAE, monotone"]
    rows = []
    for name, shown in METHODS.items():
        scores, theirs = found["sets"][part]["methods"][name], known.get(name, ("–",) * 4)
        cells_of = [shown]
        for measure, paper_value in zip(("spearman", "kendall", "mae", "rmse"), theirs, strict=True):
            cells_of += [digits(scores[measure]), str(paper_value)]
        rows.append([*cells_of, digits(scores["mae_scaled"]), digits(scores["mae_monotone"])])
    return table(header, rows)


# All cells


def overview() -> str:
    header = ["decoder, layer", "pictures", "best baseline", "its ρ", "ḡ", "DRM", "DRM, query by query", "ahead by"]
    rows = []
    for found in cells():
        for number, (name, part) in enumerate(found["sets"].items()):
            best, methods, ahead = best_of(part), part["methods"], part["ahead_of_it"]
            values = (methods[best]["spearman_pairs"], methods["constant"]["spearman_pairs"])
            rows.append(
                [
                    "" if number else title(found),
                    SETS[name] + ("" if number else " (own)"),
                    METHODS[best],
                    *_bold((*values, methods["drm"]["spearman_pairs"])),
                    interval(methods["drm"]),
                    f"{ahead['difference']:+.3f} ({ahead['low']:+.3f} to {ahead['high']:+.3f})".replace("-", "−"),
                ]
            )
    return joined(table(header, rows), source(RESULT, DEEPER, FIT), *_verdicts())


def _bold(values: tuple[float, ...]) -> list[str]:
    """Write numbers, the largest in bold."""
    written = [f"{value:.3f}".replace("-", "−") for value in values]
    return [f"**{text}**" if value == max(values) else text for value, text in zip(values, written, strict=True)]


def halved(found: dict[str, Any]) -> bool:
    part = found["sets"][own_set(found)]
    left = {name: 1 - part["methods"][name]["spearman_pairs"] for name in ("drm", best_of(part))}
    return left["drm"] <= left[best_of(part)] / 2


def _fit() -> str:
    """Say whether more pictures would bring what is missing at L4."""
    (found,) = cells(FIT)
    seen, held = found["fit"]["spearman_pairs"], found["sets"]["heldout"]["methods"]["drm"]["spearman_pairs"]
    return said(
        held < seen < held + 0.1,
        f"Why not: a metric of {title(found)}, trained on {found['training']['pictures']} pictures with two crops each "
        f"for {found['training']['steps']:,.0f} steps, has ρ {seen:.3f} on pictures that it was trained on, and "
        f"{held:.3f} on held-out ones (`{FIT}`). Most of what is missing is missing on its own training pictures: "
        "linear projections of tokens of an early layer, weighted, do not say what eight more blocks make of them.",
    )


def _verdicts() -> list[Any]:
    all_cells = cells()
    done = [found for found in all_cells if halved(found)]
    missed = [found for found in all_cells if not halved(found)]
    others = [(found, name, part) for found in all_cells for name, part in list(found["sets"].items())[1:]]
    ahead = [part for _, _, part in others if part["ahead_of_it"]["low"] > 0]
    not_ahead = [(found, name) for found, name, part in others if not part["ahead_of_it"]["low"] > 0]
    behind = [(found, name) for found, name, part in others if part["ahead_of_it"]["high"] < 0]
    worst = {title(found): found["sets"][own_set(found)]["methods"]["drm"]["spearman_pairs"] for found in missed}
    named = ", ".join(f"{title(found)} on {SETS[name]}" for found, name in not_ahead)
    held = cell("depth", 4, DEEPER)
    deep, plain = (found["sets"]["heldout"]["methods"]["drm"]["spearman_pairs"] for found in (held, cell("depth", 4)))
    gaps = [
        found["sets"][own_set(found)]["methods"]["drm"]["spearman_pairs"] - found["training"]["rho_pairs"]
        for found in all_cells
    ]
    return [
        [
            said(
                len(done) == 7 and {found["layer"] for found in missed} == {4},
                f"In distribution, 1 − ρ over all pairs is at most half of the best baseline's in {len(done)} of "
                f"{len(all_cells)} cells. It is not at L4 on photographs: "
                + ", ".join(f"{name} {value:.3f}" for name, value in worst.items())
                + ".",
            ),
            said(
                all(found["sets"][own_set(found)]["ahead_of_it"]["low"] > 0 for found in all_cells),
                "In distribution it is ahead of the best baseline in every cell, outside the interval over queries.",
            ),
            said(
                len(not_ahead) == 5 and all(found["layer"] == 4 or name == "sketch" for found, name in not_ahead),
                f"Across data it is ahead outside the interval in {len(ahead)} of {len(others)} cases. It is not for "
                f"{named}; for {len(behind)} of these it is behind.",
            ),
            said(
                deep - plain < 0.05,
                f"At L4 a head of three rounds in place of one gives {deep:.3f} for {plain:.3f} (depth, in "
                "distribution): more rounds alone do not bring it.",
            ),
            _fit(),
            said(
                max(map(abs, gaps)) < 0.04,
                "On the pictures that chose the best step, ρ over all pairs is within "
                f"{max(map(abs, gaps)):.3f} of that on the held-out ones in every cell.",
            ),
        ]
    ]


# The line under the true Jacobian


def lines() -> str:
    header = ["decoder, layer", "DRM", "energy, 8 points", "transport", "µs a pair: DRM", "energy", "transport"]
    rows, ratios, means, better, failed = [], [], [], 0, 0
    for found in cells():
        sample = found["sets"][own_set(found)]["sample"]
        methods, times = sample["methods"], sample["milliseconds_per_pair"]
        ratios.append(times["energy"] / times["drm"])
        means.append({name: methods[name]["spearman"] for name in ("drm", "energy")})
        better += methods["drm"]["spearman_low"] > methods["energy"]["spearman_high"]
        failed += "transport" not in methods
        transport = interval(methods["transport"], places=2) if "transport" in methods else "did not converge"
        rows.append(
            [
                title(found),
                interval(methods["drm"], places=2),
                interval(methods["energy"], places=2),
                transport,
                *(digits(1e3 * times[name]) for name in ("drm", "energy", "transport")),
            ]
        )
    first = cells()[0]["sets"]["heldout"]["sample"]
    return joined(
        table(header, rows),
        source(RESULT),
        f"ρ of {first['queries']} queries with {first['items']} other pictures each, mean and interval over queries. "
        "Times are of batches on one GPU that several processes shared; DRM's holds the query's own head.",
        [
            said(
                min(ratios) > 100,
                f"The energy takes {min(ratios):,.0f} to {max(ratios):,.0f} times as long as the learned distance.",
            ),
            said(
                better >= 7 and all(rho["drm"] > rho["energy"] for rho in means),
                "It is no ceiling: the learned distance orders pictures better in every cell, and outside the "
                f"intervals in {better} of {len(rows)}. The energy counts every turn that the output takes on the way, "
                "the decoder's own distance the ends alone.",
            ),
            said(
                failed > 0, f"Transport did not converge for some pairs in {failed} of {len(rows)} cells, and says so."
            ),
        ],
    )


# Galleries

ON_CPU, BY_TOKEN = "gallery_cpu.json", "gallery_tokens_cpu.json"
ON_GPU, BY_TOKEN_GPU = "gallery_cuda.json", "gallery_tokens_cuda.json"
KILLS = "gallery_crash_cpu.json"
GALLERIES = {
    ON_CPU: "100,000 on two CPU cores, images mixed in regions",
    BY_TOKEN: "100,000 on two CPU cores, mixed token by token",
    ON_GPU: "1,000,000 on an H200, images mixed in regions",
    BY_TOKEN_GPU: "1,000,000 on an H200, mixed token by token",
}

MIXED = {ON_CPU: "Images mixed in regions", BY_TOKEN: "Mixed token by token, as no image is"}


def gallery() -> str:
    stored, kills = {name: read(name) for name in GALLERIES}, read(KILLS)
    header = ["items", "search", "ms, one query", "ms a query of 32", "times faster", "of 32", "recall@10"]
    rows = []
    for file, found in stored.items():
        exact = found["exact"]
        rows.append([GALLERIES[file], "exact", digits(exact["ms_1"]), digits(exact["ms_32"]), "1", "1", "1"])
        for row in found["by_candidates"]:
            many = f"from {row['candidates']} candidates on"
            usual = ", the default" if row["default"] else ""
            times = [digits(row[key]) for key in ("ms_1", "ms_32", "faster_1", "faster_32")]
            rows.append(["", many + usual, *times, f"{row['recall']:.4f} ± {row['recall_se']:.4f}"])
    cpu, token, gpu, gpu_token = stored.values()
    defaults = {
        name: next(row for row in found["by_candidates"] if row["default"])
        for name, found in ((ON_CPU, cpu), (BY_TOKEN, token))
    }
    return joined(
        table(header, rows),
        source(*GALLERIES, KILLS),
        "Items are mixtures of the tokens of three of some hundred real images, plus noise; queries are more of the "
        "same, not in the gallery. A search goes on until the best it has found are among the first.",
        [
            said(
                token["loop"]["slower_1"] > 1,
                f"A loop over pairs, timed on {cpu['loop']['pairs']:,} of them, takes {cpu['loop']['slower_1']:.0f} "
                f"times as long as exact search on the CPU for one query, {cpu['loop']['slower_32']:.0f} times in a "
                "batch of 32.",
            ),
            said(
                cpu["items"] == 100_000,
                f"An item takes {cpu['bytes_per_item']:,} bytes ({cpu['tokens']} tokens, k = {cpu['metric']['rank']}).",
            ),
            *(
                said(
                    usual["recall"] >= 0.99 or name == BY_TOKEN,
                    f"{MIXED[name]}: the default finds {usual['recall']:.3f} of the ten nearest and is "
                    f"{usual['faster_1']:.1f} times faster than exact search for the median query, "
                    f"{usual['faster_mean']:.1f} times in the mean: a few queries need many more candidates "
                    f"({usual['compared_mean']:,} in the mean).",
                )
                for name, usual in defaults.items()
            ),
            said(
                all(0.95 < row["recall"] < 0.99 for found in (gpu, gpu_token) for row in found["by_candidates"]),
                f"A million items take {gpu['memory']['held_gb']:.1f} GB of an H200, and "
                f"{gpu['memory']['search_gb']:.1f} GB more while 32 queries are searched. Exact search is quick enough "
                f"there: {gpu['exact']['ms_1']:.0f} ms a query, {gpu['exact']['ms_32']:.1f} ms in a batch. Candidates "
                f"save {span((row['faster_1'] for found in (gpu, gpu_token) for row in found['by_candidates']), 1)} "
                "times that for single queries and nothing in a batch, and find "
                f"{span((row['recall'] for found in (gpu, gpu_token) for row in found['by_candidates']), 3)} of the "
                f"nearest among a million near mixtures of {gpu['real_images']} images.",
            ),
            said(
                kills["lost"] == kills["twice"] == kills["wrong"] == 0,
                f"{kills['kills']} kills at random moments of adding: {kills['lost']} items lost, {kills['twice']} "
                f"there twice, {kills['wrong']} wrong (`python tools/crash_gallery.py`).",
            ),
        ],
    )


# Geodesics

GEODESICS = "geodesics_cuda.json"
PROBES = {"cls": "class token, DINOv2-S", "saliency": "saliency", "scenes": "depth, `tiny-scenes`"}


def geodesics() -> str:
    header = [
        "output, layer",
        "floor",
        "energy of the straight segment over the path's, by chords",
        "along the curve (median)",
        "length over the outputs' distance: straight",
        "path",
        "path, by chords",
        "ρ straight, path",
        "ρ straight, outputs",
        "converged",
    ]
    stored = read(GEODESICS)["cases"]
    rows = []
    for name, found in stored.items():
        probe, layer = name.partition(",")[0].split("-L")
        over, rho = found["over_outputs"], found["spearman"]
        energy, curve = found["ratio"]["energy"], found["ratio"]["curve_energy"]
        rows.append(
            [
                f"{PROBES[probe]}, L{int(layer)}",
                f"{found['floor']:g}",
                f"{energy['mean']:.2f} ± {energy['se']:.2f}",
                f"{curve['median']:.2f}",
                *(f"{over[key]['mean']:.2f}" for key in ("straight", "geodesic", "geodesic, chords")),
                f"{rho['straight, geodesic']:.2f}",
                f"{rho['straight, outputs']:.2f}",
                f"{found['converged']:.0%}",
            ]
        )
    none = [found for found in stored.values() if found["floor"] == 0]
    floors: dict[str, list[float]] = {}
    for name, found in stored.items():
        floors.setdefault(name.partition(",")[0], []).append(found["ratio"]["energy"]["mean"])
    pairs = next(iter(stored.values()))["settings"]
    wanted = [(probe, layer, floor) for probe in PROBES for layer in (3, 6, 10) for floor in (0, 1e-3, 1e-1)]
    absent = [part for part in wanted if f"{part[0]}-L{part[1]:02d}, floor {part[2]:g}" not in stored]
    missing = dict.fromkeys(f"{PROBES[probe]} at L{layer}" for probe, layer, _ in absent)
    return joined(
        table(header, rows),
        source(GEODESICS),
        f"{pairs['pairs']} pairs of {pairs['held_out']} held-out images, {pairs['segments']} segments, at most "
        f"{pairs['steps']} gradients a pair; mean ± standard error over pairs. "
        "Energies by chords are what is minimised, with the outputs at the nodes alone; those along the curve are "
        "integrals by Jacobian products. Where few have converged, paths had still energy by chords to lose."
        + (f" Not measured, or not with every floor: {', '.join(missing)}." if missing else ""),
        [
            said(
                all(found["ratio"]["energy"]["mean"] > 1.3 for found in none),
                "The straight segment is no geodesic in any case: by chords its energy is "
                + span((found["ratio"]["energy"]["mean"] for found in none), 1)
                + " times that of the path that was found, along the curve "
                + span((found["ratio"]["curve_energy"]["median"] for found in none), 1)
                + " times (medians), and its length "
                + span((found["over_outputs"]["straight"]["mean"] for found in none), 1)
                + " times the distance of the outputs, below which no path can be.",
            ),
            said(
                all(found["over_outputs"]["geodesic, chords"]["mean"] < 1.2 for found in none),
                "By the outputs at its nodes the path is nearly straight in the space of outputs ("
                + span(found["over_outputs"]["geodesic, chords"]["mean"] for found in none)
                + "); between the nodes it is longer ("
                + span(found["over_outputs"]["geodesic"]["mean"] for found in none)
                + "), which more segments would see.",
            ),
            said(
                all(found["spearman"]["straight, geodesic"] > found["spearman"]["straight, outputs"] for found in none),
                "Order suffers less than length: over pairs, lengths of segment and path agree with ρ "
                + span(found["spearman"]["straight, geodesic"] for found in none)
                + ", lengths of the segment and distances of the outputs with "
                + span(found["spearman"]["straight, outputs"] for found in none)
                + ".",
            ),
            said(
                all(max(values) - min(values) < 0.05 * max(values) for values in floors.values()) and not missing,
                "A floor of up to a tenth of the mean eigenvalue changes the ratio of energies by less than a "
                "twentieth in every case.",
            ),
            said(
                all(found["converged"] < 0.4 for name, found in stored.items() if name[:7] in ("cls-L03", "cls-L06")),
                "At early layers few paths of the class token have converged, so that the ratios there are lower "
                "bounds.",
            ),
        ],
    )


def card() -> str:
    """What the metric of `tiny-scenes` that ships does."""
    found = cell("scenes", 8)
    rows = []
    for name, part in found["sets"].items():
        best = best_of(part)
        for method in ("drm", "constant", best):
            scores = part["methods"][method]
            label = METHODS[method] + (", the best baseline" if method == best else "")
            rows.append([SETS[name], label, f"{scores['spearman_pairs']:.3f}", interval(scores), digits(scores["mae"])])
    return joined(
        table(["200 scenes each", "distance", "ρ over all pairs", "ρ query by query", "MAE"], rows), source(RESULT)
    )


BLOCKS = {
    "tiny-scenes-drm-card": card,
    "retrieval-paper": paper,
    "retrieval-overview": overview,
    "retrieval-lines": lines,
    "gallery": gallery,
    "geodesics": geodesics,
}
