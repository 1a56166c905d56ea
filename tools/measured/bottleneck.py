"""The bottleneck: spectra before and after it, what the task keeps, and how alike the two pullbacks are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .common import digits, facts_of, in_words, joined, listed, pm, read, said, source, span, table

SPECTRA, TRAINING = "bottleneck_cpu.json", "bottleneck_training_cpu.json"
NO_CELLS, NO_CELLS_TRAINING = "bottleneck_cuda.json", "bottleneck_training_cuda.json"
"""Of networks that started at random, and were trained much longer."""
CASES = {
    "saliency-L11": "DINOv2-S saliency at L11",
    "saliency-L11-small": "DINOv2-S saliency (4 registers) at L11",
    "saliency-L10": "DINOv2-S saliency at L10",
    "saliency-L08": "DINOv2-S saliency at L8",
    "dinov2-depth": "DINOv2-S depth at its inputs",
    "dinov2-depth-L08": "DINOv2-S depth at L8",
    "views-depth": "`tiny-views` depth at x_vis",
    "views-points": "`tiny-views` points at x_vis",
    "scenes-depth": "`tiny-scenes` depth at its four layers",
}
SIZES = {f"size-{size}": f"{size:,}" for size in (256, 512, 1024, 2048, 4096, 8192)}
WEIGHTS = {f"weight-{weight}": f"{weight:,}" for weight in (0, 1, 10, 100, 1000)}
KINDS = {"size-4096": "S²-VAE", "gaussian": "Gaussian VAE", "deterministic": "plain autoencoder"}
CONTROL = {"no-cells": "S²-VAE without cells"}
READ_BY_THE_DECODER = (
    "saliency-L11",
    "saliency-L11-small",
    "dinov2-depth",
    "views-depth",
    "views-points",
    "scenes-depth",
)
"""Cases whose place is what the decoder reads; the others lie before it."""
ARROW = " → "
NEAR = 0.97
"""The δ1 against the output without a bottleneck that a good one is expected to keep."""
LOW = 0.9
"""A spectrum is rich where 50 directions hold less than this share of it."""
Case = dict[str, Any]


def cases(names: Iterable[str], file: str = SPECTRA) -> dict[str, Case]:
    """Return the cases of these names that were measured."""
    found = read(file)["cases"]
    return {name: found[name] | {"name": name} for name in names if name in found}


def rich(measured: Mapping[str, Case]) -> dict[str, Case]:
    """Return the cases whose spectrum is rich without a bottleneck."""
    return {name: case for name, case in measured.items() if mean(case, "before", "kappa_50") < LOW}


def origin(measured: Mapping[str, Case], titles: Mapping[str, str], file: str = SPECTRA) -> str:
    """Write where the cases were measured. Those of one file may come from several machines; pictures have the size of
    the model's own, or the one that is said."""
    groups: dict[str, list[str]] = {}
    for name, case in measured.items():
        own = case["settings"]
        size = f", pictures of {own['size']} pixels" if own["size"] else ""
        found = in_words(facts_of({"machine": case["machine"], "precision": own["precision"] + size}, name))
        groups.setdefault(found, []).append(titles[name])
    most, *others = sorted(groups, key=lambda found: -len(groups[found]))
    apart = [f"{listed([f'“{own}”' for own in groups[found]])} ({found})" for found in others]
    return f"*`{file}` ({most}{'; except ' * bool(apart)}{', '.join(apart)})*"


def mean(case: Case, part: str, key: str) -> float:
    return float(case[part][key]["mean"])


def both(case: Case, key: str, places: int) -> str:
    """Write a number before and after."""
    return ARROW.join(f"{mean(case, part, key):.{places}f}" for part in ("before", "after"))


def with_errors(case: Case, key: str, places: int) -> str:
    return ARROW.join(pm(case[part][key], places) for part in ("before", "after"))


def r90(found: Case) -> str:
    return f"> {found['r90']['median'] - 1}" if found["r90"]["bound"] else str(found["r90"]["median"])


def between(values: Iterable[float]) -> str:
    low, *_, high = sorted(values)
    return f"between {low:,.0f} and {high:,.0f}"


def lost_variance(case: Case) -> float:
    """Return the share of the features' variance that does not come back, mean over layers."""
    shares = case["quality"]["unexplained"]
    return float(sum(shares.values()) / len(shares))


# Spectra


def answer() -> str:
    """What was reached and what was not, whichever way it came out."""
    measured = cases(CASES)
    full, delta1 = rich(measured), depth_quality(measured)
    before, after = ([mean(case, part, "kappa_50") for case in full.values()] for part in ("before", "after"))
    ranks = [
        f"{mean(case, 'before', 'r_eff'):,.0f} to {mean(case, 'after', 'r_eff'):,.0f} for {CASES[name]}"
        for name, case in full.items()
    ]
    still = [CASES[name] for name, case in full.items() if mean(case, "after", "kappa_50") < LOW]
    far = [name for name, value in delta1.items() if value < NEAR]
    scores = [f"{value:.3f} for {short(name)}" for name, value in delta1.items()]
    share = {name: case["agreement"]["20"]["share"]["mean"] for name, case in measured.items()}
    inputs = {name: value for name, value in share.items() if name in READ_BY_THE_DECODER}
    earlier = [value for name, value in share.items() if name not in READ_BY_THE_DECODER]
    rho = [case["agreement"]["20"]["spearman_patches"]["mean"] for case in measured.values()]
    words = [
        f"**Tractable: {'in part' if still else 'yes'}.** Where 50 directions held {span(before)} of the pullback, "
        f"they hold {span(after)} of the compressed one; the effective rank goes from {listed(ranks)}."
        + (f" Still rich {'are' if still[1:] else 'is'} {listed(still)}." if still else ""),
        f"**The task's output: {'kept in part' if far else 'kept'}.** δ1 against the depth without a bottleneck is "
        f"{listed(scores)}, where a good one keeps at least {NEAR} (paper: ≈ 0.99)." + saliency_kept(measured),
        f"**The original's directions: {'mostly' if min(inputs.values()) > 0.5 else 'in part'}.** At what the decoder "
        f"reads, the 20 leading directions of the compressed probe hold {span(inputs.values())} of what the best 20 "
        "hold of the original pullback"
        + (f", at earlier layers {span(earlier)}" if earlier else "")
        + f". Which patches matter agrees with ρ = {span(rho)}. More weight for the task finds more of them "
        "([below](#the-weight-of-the-task)).",
    ]
    return joined([f"- {sentence}" for sentence in words])


def saliency_kept(measured: Mapping[str, Case]) -> str:
    found = [case for name, case in measured.items() if name.startswith("saliency")]
    return f" The saliency map keeps a correlation of {mean(found[0], 'quality', 'correlation'):.3f}." if found else ""


def spectra() -> str:
    paper = ["4,096", "282" + ARROW + "30 to 53", "≫ 100" + ARROW + "≈ 40", "", "0.578" + ARROW + "not stated", ""]
    rows = [["*paper: VGGT-1B depth at x_vis*", "", "", "", *paper]]
    measured, others = cases(CASES), cases(CASES, NO_CELLS)
    for name in CASES:
        found = {"cells": measured.get(name), "random": others.get(name)}
        for kind, case in ((kind, case) for kind, case in found.items() if case is not None):
            own = case["case"]
            title = "" if kind == "random" and name in measured else CASES[name]
            sizes = [str(own["pixels"][0]), f"{own['outputs']:,}", f"{own['bound']:,}"]
            kappas = [both(case, f"kappa_{rank}", 2) for rank in (20, 50)]
            reach = ARROW.join(r90(case[part]) for part in ("before", "after"))
            cells = [with_errors(case, "r_eff", 1), reach, *kappas, both(case, "cv_patches", 2)]
            rows.append([title, kind, *sizes, *cells])
    header = ["probe", "start", "pixels", "M", "M'", "r_eff", "r_0.90", "κ(20)", "κ(50)", "CV of patches"]
    settings = next(iter(measured.values()))["settings"]
    return joined(
        table(header, rows),
        f"{origin(measured, CASES)}; {origin(others, CASES, NO_CELLS)}",
        f"Without the bottleneck{ARROW}with it, at the same features of {settings['samples']} held-out images, or "
        f"scenes of {settings['views']} views (not the same ones in both files): mean ± standard error over them. "
        f"{settings['rank']} modes, converged to 1e-4, so r_0.90 (the median) is known up to {settings['rank']}. M' is "
        "the bound on the rank: registers times their dimension, for each view. Networks start at the cells, or "
        "without them at random and with less weight for the task ([the start](#the-start)).",
        spectra_sentences(measured, others),
    )


def short(name: str) -> str:
    """The decoder of a case, without its place."""
    return CASES[name].partition(" at ")[0]


def spectra_sentences(measured: dict[str, Case], others: Mapping[str, Case]) -> list[str]:
    """Say where spectra became poorer and how far, and beside that which were never rich."""
    full = rich(measured)
    reached = [r90(case["after"]) for case in full.values()]
    low = {name: case for name, case in measured.items() if name not in full}
    sentences = [
        said(
            all(mean(case, "after", "r_eff") < mean(case, "before", "r_eff") for case in full.values()),
            f"Rich without a bottleneck (κ(50) below {LOW}) are {listed([CASES[name] for name in full])}. There the "
            f"effective rank falls from {between(mean(c, 'before', 'r_eff') for c in full.values())} to "
            f"{between(mean(c, 'after', 'r_eff') for c in full.values())} (paper: from 282 to between 30 and 53), and "
            f"r_0.90 to {listed(reached)} (paper: ≈ 40).",
        )
    ]
    poor = rich(others)
    ranks = [mean(case, "after", "r_eff") for case in poor.values()]
    sentences.append(
        said(
            all(mean(case, "after", "kappa_50") > LOW for case in poor.values()),
            f"Behind networks that start at random the effective rank of the rich cases falls to {between(ranks)} and "
            "κ(50) to at least "
            f"{min(mean(case, 'after', 'kappa_50') for case in poor.values()):.2f}; how much of the original they keep "
            "is [another matter](#the-start).",
        )
    )
    if low:
        change = [mean(case, "after", "r_eff") / mean(case, "before", "r_eff") for case in low.values()]
        sentences.append(
            f"- Not rich to begin with {'are' if len(low) > 1 else 'is'} {listed([CASES[name] for name in low])}: "
            f"there the effective rank becomes {span(change)} of what it was."
        )
    if "scenes-depth" in full:
        sentences.append(
            "- `tiny-scenes` depth was chosen as a control of low rank. At its full size it is not one (κ(50) = "
            f"{mean(full['scenes-depth'], 'before', 'kappa_50'):.2f} without a bottleneck), on pictures of half the "
            f"side it is ({mean(cases(SIZES)['size-4096'], 'before', 'kappa_50'):.2f})."
        )
    delta1 = {name: value for name, value in depth_quality(full).items() if value < NEAR}
    if delta1:
        sentences.append(
            f"- A low rank says little where the output is another one: "
            f"{listed([f'{short(name)} (δ1 {value:.3f})' for name, value in delta1.items()])}."
        )
    return sentences


def depth_quality(measured: Mapping[str, Case]) -> dict[str, float]:
    """Return δ1 of the cases of depth, one for each bottleneck."""
    found: dict[str, float] = {}
    seen: set[str] = set()
    for name, case in measured.items():
        if "delta1" in case["quality"] and case["case"]["bottleneck"] not in seen:
            seen.add(case["case"]["bottleneck"])
            found[name] = mean(case, "quality", "delta1")
    return found


def latent() -> str:
    """The same map seen from the registers, on their spheres and in the ambient space."""
    parts = ("latent, sphere", "latent, ambient")
    measured = {name: case for name, case in cases(CASES, NO_CELLS).items() if set(parts) <= set(case)}
    once = {case["case"]["bottleneck"]: name for name, case in measured.items()}  # places share their registers
    rows, differences = [], []
    for name in once.values():
        found = [measured[name][part] for part in parts]
        cells = [pm(own["r_eff"], 1) for own in found] + [" / ".join(r90(own) for own in found)]
        cells += [" / ".join(f"{own[f'kappa_{rank}']['mean']:.2f}" for own in found) for rank in (20, 50)]
        rows.append([short(name), f"{found[0]['inputs']:,}", *cells])
        differences.append(abs(found[1]["r_eff"]["mean"] / found[0]["r_eff"]["mean"] - 1))
    header = ["decoder", "numbers", "r_eff on the spheres", "r_eff, ambient", "r_0.90", "κ(20)", "κ(50)"]
    return joined(
        table(header, rows),
        origin({name: measured[name] for name in once.values()}, {name: short(name) for name in CASES}, NO_CELLS),
        "z ↦ decoder(G(z)) at z = E(x), of networks without cells; pairs are sphere / ambient.",
        "- Leaving out the directions off the spheres changes the effective rank by "
        f"{digits(100 * max(differences), 1)} % at most.",
    )


def rank_bound() -> str:
    """The numerical rank of the compressed Jacobian, where it was counted."""
    counted = {name: case for name, case in cases(SIZES).items() if "rank" in case}
    rows, limits = [], []
    for case in counted.values():
        own, found = case["case"], case["rank"]
        limits.append(own["views"] * own["registers"] * (own["latent"] - 1))
        rows.append(
            [
                f"`{own['model']}` {own['decoder']}, {own['registers']} × {own['latent']}",
                f"{found['bound']:,}",
                f"{limits[-1]:,}",
                f"{found['numerical']:,}",
                f"{found['first_beyond_the_bound']:.0e}",
            ]
        )
    header = ["compressed probe", "M' = R d", "R (d − 1)", "numerical rank", "σ beyond M', of the first"]
    columns = next(iter(counted.values()))["rank"]
    numerical = [case["rank"]["numerical"] for case in counted.values()]
    return joined(
        table(header, rows),
        origin(counted, SIZES),
        f"Products with {columns['columns'] - columns['bound']} random directions more than M', of one scene, in "
        f"float64; singular values below {columns['zero']:.0e} of the first count as none. On its sphere a register of "
        "d numbers has d − 1 directions. Larger bottlenecks were not counted.",
        [
            said(
                numerical == limits,
                "The rank is exactly the number of directions of the latent; what lies beyond is round-off.",
            )
        ],
    )


# Outputs


def quality() -> str:
    """The task with and without the bottleneck."""
    rows = [["*paper: VGGT-1B depth*", "≈ 0.99", "", "", "", ""]]
    measured = cases(CASES)
    once = {case["case"]["bottleneck"]: name for name, case in measured.items()}  # places share the output
    for name in once.values():
        found = measured[name]["quality"]
        depth = [pm(found["delta1"], 3), pm(found["abs_rel"], 3)] if "delta1" in found else ["", ""]
        others = [pm(found["correlation"], 3), pm(found["relative_l2"], 3)]
        lost = ", ".join(f"{layer} {share:.2f}" for layer, share in found["unexplained"].items())
        rows.append([short(name), *depth, *others, lost])
    sentences = [
        f"- δ1 is {'at least' if value >= NEAR else 'below'} {NEAR} for {short(name)} ({value:.3f})."
        for name, value in depth_quality(measured).items()
    ]
    most = max(measured.values(), key=lost_variance)
    sentences.append(
        f"- What the decoder does not read need not come back: of the features of {short(most['name'])} "
        f"{100 * lost_variance(most):.0f} % of the variance is lost."
    )
    count = next(iter(measured.values()))["quality"]["images"]
    header = ["decoder", "δ1", "AbsRel", "correlation", "relative L2", "variance of the features that is lost"]
    note = f"Output from G(E(x)) against output from x, {count} held-out images or scenes; lost variance by layer."
    where = origin({name: measured[name] for name in once.values()}, {name: short(name) for name in CASES})
    return joined(table(header, rows), where, note, sentences)


def training() -> str:
    """What the training of each bottleneck took, and where it ended."""
    document = read(TRAINING)
    runs = {name: run for name, run in document["runs"].items() if run["settings"]["steps"] > 1}
    rows = []
    for name, run in runs.items():
        own, scores = run["settings"], run["scores"]
        size = f"{own['registers'] * own['latent']:,}" + (
            "" if own["posterior"] == "power-spherical" else f", {own['posterior']}"
        )
        drawn = f"{own['limit']:,} photographs" if own["images"] else f"{own['block']:,} scenes"
        steps = f"{own['steps']:,} × {own['batch']}"
        cells = [str(own["pixels"]), size, drawn, steps, f"{run['seconds']:.0f}", score_of(scores)]
        name += " (ships)" if run["ships"] else ""
        rows.append([name, *cells, f"{scores['unexplained']:.3f}", f"{run['bytes'] / 1e6:.1f}"])
    seconds = [run["seconds"] for run in runs.values()]
    header = ["run", "pixels", "M' of a view", "data", "steps", "seconds", "score", "lost variance", "MB"]
    return joined(
        table(header, rows),
        source(TRAINING),
        "Scores on held-out scenes or photographs, averaged weights; lost variance is the mean over layers. Seconds "
        f"are of one core, with reading or drawing the pictures, while {document['processes']} such processes shared "
        "the machine. The commands are in the file.",
        [
            said(
                max(seconds) < 1200,
                f"A bottleneck takes {min(seconds) / 60:.0f} to {max(seconds) / 60:.0f} minutes of one CPU core, and "
                "no GPU.",
            ),
        ],
    )


def score_of(scores: Mapping[str, float]) -> str:
    """Write the score of a training in the task's own measure."""
    name, title = ("delta1", "δ1") if "delta1" in scores else ("relative_l2", "relative L2")
    return f"{title} {scores[name]:.3f} ± {scores[f'{name}_se']:.3f}"


def card() -> str:
    """The scores of the bottleneck that ships."""
    run = read(TRAINING)["runs"]["tiny-scenes"]
    scores, own = run["scores"], run["settings"]
    case = cases(["scenes-depth"])["scenes-depth"]
    found = case["agreement"]["20"]
    energies = [f"{found['kappa']['mean']:.3f}", pm(found["captured"], 3)]
    rows = [
        ["depth: δ1", f"{scores['delta1']:.4f} ± {scores['delta1_se']:.4f}"],
        ["depth: AbsRel", f"{scores['abs_rel']:.4f}"],
        *([f"lost variance of layer {layer}", f"{scores[f'unexplained_L{layer:02d}']:.3f}"] for layer in own["layers"]),
        ["effective rank of the depth map at the features, without → with", with_errors(case, "r_eff", 1)],
        ["energy of the original metric in 20 directions, its own → the compressed ones", ARROW.join(energies)],
        ["rank correlation of the importances of patches", pm(found["spearman_patches"], 2)],
    ]
    return joined(
        table(["held-out scenes, with the bottleneck against without", ""], rows),
        f"{source(TRAINING)}; {origin({'scenes-depth': case}, CASES)}",
        f"- Training took {run['seconds']:.0f} s on one core of a CPU; the file has {run['bytes'] / 1e6:.1f} MB.",
    )


# Agreement


def agreement() -> str:
    """How far the compressed pullback tells of the original one."""
    rows = []
    measured = cases(CASES)
    for name, case in measured.items():
        for rank, found in case["agreement"].items():
            angles = found["angles"]
            cells = [
                pm(found["captured"], 3),
                f"{found['kappa']['mean']:.3f}",
                pm(found["share"], 3),
                pm(found["alignment"], 3),
                f"{angles[0]:.0f}°, {angles[len(angles) // 2]:.0f}°, {angles[-1]:.0f}°",
                pm(found["spearman_patches"], 3),
            ]
            rows.append([CASES[name] if rank == "20" else "", rank, *cells])
    header = ["probe", "r", "energy of g captured", "κ(r)", "share of κ(r)", "V₁", "angles", "ρ of importances"]
    return joined(
        table(header, rows),
        origin(measured, CASES),
        "The leading r directions of the compressed probe, judged by the original: the energy of g that they hold, of "
        "which the best r directions hold κ(r); V₁ = |VᵀṼ|²/r and the principal angles between the two subspaces "
        "(smallest, median, largest); Spearman's ρ of the two importances over patches.",
        agreement_sentences(measured),
    )


def agreement_sentences(measured: Mapping[str, Case]) -> list[str]:
    at_20 = {name: case["agreement"]["20"] for name, case in measured.items()}
    share = {name: found["share"]["mean"] for name, found in at_20.items()}
    inputs = [name for name in share if name in READ_BY_THE_DECODER]
    rho = [found["spearman_patches"]["mean"] for found in at_20.values()]
    chain = [name for name in ("saliency-L11", "saliency-L10", "saliency-L08") if name in share]
    least = min(inputs, key=lambda name: share[name])
    sentences = [
        f"- At what the decoder reads, the compressed directions hold {span(share[name] for name in inputs)} of what "
        f"20 directions can hold, least for {CASES[least]}; the smallest principal angles are "
        f"{span((at_20[name]['angles'][0] for name in inputs), 0)} degrees. It is a map near the original, not the "
        "same map in fewer numbers.",
        said(
            min(rho) > 0.4,
            f"Importances of patches agree with ρ = {span(rho)}: where the task looks survives the bottleneck better "
            "than in which directions.",
        ),
    ]
    if len(chain) == 3 and share[chain[0]] < share[chain[1]] < share[chain[2]]:
        held = ", ".join(f"{share[name]:.2f} at L{int(name[-2:])}" for name in chain)
        sentences.insert(1, f"- Seen from earlier layers the same bottleneck agrees better: {held} (saliency).")
    return sentences


def sizes() -> str:
    """The curve of tractability against fidelity."""
    measured = cases(SIZES)
    rows = []
    for case in measured.values():
        own, found = case["case"], case["agreement"]
        rows.append(
            [
                f"{own['bound']:,} ({own['registers']} × {own['latent']})",
                pm(case["after"]["r_eff"], 1),
                r90(case["after"]),
                f"{mean(case, 'after', 'kappa_20'):.3f}",
                pm(case["quality"]["delta1"], 3),
                f"{lost_variance(case):.3f}",
                pm(found["20"]["share"], 3),
                pm(found["50"]["share"], 3),
                pm(found["20"]["spearman_patches"], 3),
            ]
        )
    own = list(measured.values())
    without = own[0]["before"]
    rows.append(
        ["none", pm(without["r_eff"], 1), r90(without), f"{without['kappa_20']['mean']:.3f}", "1", "0", "1", "1", "1"]
    )
    curves = {
        "δ1": [mean(case, "quality", "delta1") for case in own],
        "share": [case["agreement"]["20"]["share"]["mean"] for case in own],
        "ρ": [case["agreement"]["20"]["spearman_patches"]["mean"] for case in own],
        "r_eff": [mean(case, "after", "r_eff") for case in own],
    }
    ends = {name: (f"{values[0]:.3f}", f"{values[-1]:.3f}") for name, values in curves.items()}
    header = ["M'", "r_eff", "r_0.90", "κ(20)", "δ1", "lost variance", "share of κ(20)", "share of κ(50)", "ρ"]
    return joined(
        table(header, rows),
        origin(measured, SIZES),
        "`tiny-scenes` depth at its four layers, bottlenecks trained alike (2 to 64 registers of 128 numbers), "
        "on pictures of half the side that the model was made for. "
        "The share of κ(r) is the energy of g in the compressed probe's leading r directions, over that in the best r; "
        "ρ is of importances over patches.",
        [
            said(
                curves["δ1"][-1] > curves["δ1"][0] and curves["share"] == sorted(curves["share"]),
                f"More numbers are more faithful: from the smallest to the largest δ1 goes from {ends['δ1'][0]} to "
                f"{ends['δ1'][1]}, ρ from {ends['ρ'][0]} to {ends['ρ'][1]}, and the share of κ(20) from "
                f"{ends['share'][0]} to {ends['share'][1]}.",
            ),
            said(
                curves["r_eff"][0] == min(curves["r_eff"]),
                f"And less tractable: the effective rank is {curves['r_eff'][0]:.1f} at the smallest size and "
                f"{curves['r_eff'][-1]:.1f} at the largest, {without['r_eff']['mean']:.1f} without a bottleneck.",
            ),
        ],
    )


def weights() -> str:
    """What the weight of the task does to the start in closed form."""
    measured = cases(WEIGHTS)
    rows = [
        [
            WEIGHTS[name],
            pm(case["after"]["r_eff"], 1),
            r90(case["after"]),
            f"{mean(case, 'after', 'kappa_20'):.3f}",
            pm(case["quality"]["delta1"], 4),
            f"{lost_variance(case):.3f}",
            pm(case["agreement"]["20"]["share"], 3),
            pm(case["agreement"]["50"]["share"], 3),
            f"{case['agreement']['20']['angles'][0]:.0f}°",
            pm(case["agreement"]["20"]["spearman_patches"], 3),
        ]
        for name, case in measured.items()
    ]
    own = list(measured.values())
    without, size = own[0]["before"], own[0]["case"]
    plain = [pm(without["r_eff"], 1), r90(without), f"{without['kappa_20']['mean']:.3f}"]
    rows.append(["no bottleneck", *plain, "1", "0", "1", "1", "0°", "1"])
    share = [case["agreement"]["20"]["share"]["mean"] for case in own]
    lost = [lost_variance(case) for case in own]
    ranks = [mean(case, "after", "r_eff") for case in own]
    header = [
        "weight",
        "r_eff",
        "r_0.90",
        "κ(20)",
        "δ1",
        "lost variance",
        "share of κ(20)",
        "share of κ(50)",
        "angle",
        "ρ",
    ]
    return joined(
        table(header, rows),
        origin(measured, WEIGHTS),
        f"`tiny-scenes` depth at its four layers, {size['registers']} registers of {size['latent']} numbers, before "
        "the first step of training: closed forms of 256 scenes. The angle is the smallest principal one of the two "
        "subspaces of 20 directions; the other columns are those of the next table.",
        [
            said(
                share == sorted(share) and lost == sorted(lost),
                f"The more the task weighs, the more the compressed directions are those of the original: the share of "
                f"κ(20) rises from {share[0]:.2f} to {share[-1]:.2f}, and the lost variance from {lost[0]:.2f} to "
                f"{lost[-1]:.2f}.",
            ),
            said(
                max(ranks) < without["r_eff"]["mean"],
                f"The effective rank is {span(ranks, 1)}, below the {without['r_eff']['mean']:.1f} of the original, "
                "whatever the weight.",
            ),
        ],
    )


COMPARED = {
    "size-4096": "`tiny-scenes` depth, 112 pixels",
    "scenes-depth": "`tiny-scenes` depth, 224 pixels",
    "views-depth": "`tiny-views` depth",
    "dinov2-depth": "DINOv2-S depth",
    "saliency-L11": "DINOv2-S saliency",
}


def start() -> str:
    """Registers that start at the principal components of cells, beside those that start at random."""
    rows, gains = [], {}
    files = {"random": (NO_CELLS, NO_CELLS_TRAINING), "cells": (SPECTRA, TRAINING)}
    both_have = cases(COMPARED, NO_CELLS).keys() & cases(COMPARED).keys()
    for name in (own for own in COMPARED if own in both_have):
        for kind, (file, trained) in files.items():
            case = cases([name], file)[name]
            run = read(trained)["runs"][case["case"]["bottleneck"]]
            own, found = run["settings"], case["agreement"]["20"]
            task = case["quality"].get("delta1", case["quality"]["correlation"])
            rank = mean(case, "after", "r_eff")
            gains.setdefault(name, []).append((lost_variance(case), task["mean"], found["share"]["mean"], rank))
            rows.append(
                [
                    COMPARED[name] if kind == "random" else "",
                    kind,
                    f"{own['steps']:,} × {own['batch']}",
                    f"{run['seconds']:,.0f} s, {'a GPU' if file == NO_CELLS else 'one CPU core'}",
                    pm(task, 3),
                    f"{lost_variance(case):.3f}",
                    pm(found["share"], 3),
                    pm(found["spearman_patches"], 3),
                ]
            )
    even, plain = cases(["weight-1"])["weight-1"], cases(["size-4096"], NO_CELLS)["size-4096"]
    better = all(new[0] < old[0] and new[2] > old[2] for old, new in gains.values())
    factors = [new[2] / old[2] for old, new in gains.values()]
    header = ["decoder", "start", "steps", "training", "δ1 or correlation", "lost variance", "share of κ(20)", "ρ"]
    poorer = [name for name, (old, new) in gains.items() if old[3] < new[3]]
    return joined(
        table(header, rows),
        f"{source(NO_CELLS)}; {source(SPECTRA)}; {source(NO_CELLS_TRAINING, TRAINING)}",
        "The task weighs 1 from the random start and 10 from the cells; saliency is judged by the correlation of the "
        "two maps. The networks at random are those of `--no-cells --task-weight 1`, their GPU was an H200; they were "
        "trained on other pictures and measured on other photographs, and their training was not tuned.",
        [
            said(
                better,
                "From the cells, a few hundred small steps on a CPU core lose less of the features and find more of "
                f"the original's directions ({span(factors, 0)} times as much of κ(20)) than longer trainings on a GPU "
                "from a random start.",
            ),
            f"- What is faithful is richer: the effective rank behind the cells is above that of the other network for "
            f"{listed([COMPARED[name] for name in poorer])}. Networks from a random start have few directions, and "
            "those hold little of the original's."
            if poorer
            else "- The effective rank behind the cells is not above that of the other networks.",
            said(
                even["agreement"]["20"]["share"]["mean"] > plain["agreement"]["20"]["share"]["mean"],
                "The weight of the task is a part of it, the start another: with a weight of 1 and before the first "
                f"step, the cells of `tiny-scenes` at 112 pixels have {even['agreement']['20']['share']['mean']:.2f} "
                f"of κ(20), the trained network from a random start {plain['agreement']['20']['share']['mean']:.2f}.",
            ),
        ],
    )


def kinds() -> str:
    """Other latents of the same size, and the same one without cells."""
    measured, control = cases(KINDS), cases(CONTROL)
    rows = []
    for name, case in (measured | control).items():
        found = case["agreement"]["20"]
        rows.append(
            [
                (KINDS | CONTROL)[name],
                f"{case['case']['registers']} × {case['case']['latent']}",
                pm(case["after"]["r_eff"], 1),
                pm(case["quality"]["delta1"], 4),
                pm(case["quality"]["abs_rel"], 4),
                f"{lost_variance(case):.3f}",
                pm(found["share"], 3),
                pm(found["spearman_patches"], 3),
            ]
        )
    header = ["latent", "size", "r_eff", "δ1", "AbsRel", "lost variance", "share of κ(20)", "ρ"]
    scores = [case["quality"]["delta1"] for case in measured.values()]
    shares = [case["agreement"]["20"]["share"]["mean"] for case in measured.values()]
    ranks = [mean(case, "after", "r_eff") for case in measured.values()]
    gap = max(score["mean"] for score in scores) - min(score["mean"] for score in scores)
    alike = gap < 2 * min(score["se"] for score in scores)
    random = control["no-cells"]
    run = read(TRAINING)["runs"][random["case"]["bottleneck"]]["settings"]
    return joined(
        table(header, rows),
        origin(measured | control, KINDS | CONTROL),
        f"`tiny-scenes` depth at the four layers, trained alike: {run['steps']} steps of {run['batch']} scenes, weight "
        f"of the task {run['task_weight']:g}.",
        [
            f"- {'The three are alike: δ1 differs' if alike else 'They differ in δ1,'} by {gap:.4f} (standard errors "
            f"{span((score['se'] for score in scores), 4)}); effective ranks are {span(ranks, 1)}, shares of κ(20) "
            f"{span(shares)}. What bounds the rank is the size.",
            said(
                lost_variance(random) > max(map(lost_variance, measured.values()))
                and random["agreement"]["20"]["share"]["mean"] < min(shares),
                f"Without cells the same training loses {lost_variance(random):.2f} of the variance and finds "
                f"{random['agreement']['20']['share']['mean']:.3f} of κ(20).",
            ),
        ],
    )


BLOCKS = {
    "bottleneck-answer": answer,
    "bottleneck-spectra": spectra,
    "bottleneck-quality": quality,
    "bottleneck-latent": latent,
    "bottleneck-rank": rank_bound,
    "bottleneck-agreement": agreement,
    "bottleneck-weights": weights,
    "bottleneck-start": start,
    "bottleneck-sizes": sizes,
    "bottleneck-kinds": kinds,
    "bottleneck-training": training,
    "tiny-scenes-s2vae-card": card,
}
