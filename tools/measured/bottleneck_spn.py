"""The Spectral Pullback Network in the latent of a bottleneck."""

from __future__ import annotations

from typing import Any

from .common import joined, read, said, signed, source, span, table

SPN = "bottleneck_spn_tiny-scenes_depth_ambient_cuda.json"
CONSTANT, UNTRAINED, RANDNLA, SPECTRAL = "best constant subspace", "random init", "RandNLA q=1", "Spectral"
STARTS = {"from a random start": "", "from the constant": " from constant"}


def spn() -> str:
    document = read(SPN)
    found = {row["network"]: row for row in document["rows"]}
    own, (registers, dim) = document["settings"], document["latent"]
    title = f"`tiny-scenes` {own['decoder']}, z ∈ R^({registers}×{dim}), κ({own['rank']}) = {document['kappa']:.2f}"
    header = [title, "V₁", "lead over the constant", "natural ratio", "paper's V₁"]
    gaps = {start: found[RANDNLA + name]["v1"] - found[SPECTRAL + name]["v1"] for start, name in STARTS.items()}
    trained = [found[kind + name] for kind in (RANDNLA, SPECTRAL) for name in STARTS.values()]
    shares = [row["natural_ratio"] / document["kappa"] for row in trained]
    expected = document["random_v1"]
    paper = [row["paper_v1"] for row in trained if row["paper_v1"] is not None]
    best = max(row["v1"] for row in trained)
    return joined(
        table(header, [cells(row) for row in document["rows"]]),
        source(SPN),
        f"{own['steps']:,} steps of {own['batch']} scenes out of {own['train']:,}, {own['held_out']} held-out scenes. "
        f"Exact modes are those of block Krylov converged to {own['rtol']:g}; sketches are in {own['precision']}; "
        f"the latent is {own['space']}. The paper's values are those of VGGT's depth.",
        [
            said(
                found[UNTRAINED]["v1"] < 0.02,
                f"A random network finds {found[UNTRAINED]['v1']:.3f}; a random subspace would cover r/M' = "
                f"{expected:.3f}.",
            ),
            said(document["sketch_v1"] < 1, close(gaps, document["sketch_v1"])),
            *(f"- {lead(start, [found[RANDNLA + name], found[SPECTRAL + name]])}" for start, name in STARTS.items()),
            f"- {far(best, paper)} Training was short ({own['steps']:,} steps on {own['train']:,} scenes), and longer "
            "ones were not tried.",
            said(
                max(shares) <= 1,
                f"The learned subspaces hold {span(shares)} of the sensitivity that any {own['rank']} directions can "
                "hold.",
            ),
        ],
    )


def far(best: float, paper: list[float]) -> str:
    """Say where the best network is beside the paper's."""
    if best < min(paper):
        much = "far " if best < min(paper) / 2 else ""
        return f"All of them stay {much}below the paper's {span(paper, 3)}: the best is {best:.3f}."
    return f"The best reaches {best:.3f} (paper: {span(paper, 3)})."


def cells(row: dict[str, Any]) -> list[str]:
    ahead = "" if row["network"] == CONSTANT else signed(row["v1_lead"], row["v1_lead_half_width"], 4)
    paper = "" if row["paper_v1"] is None else f"{row['paper_v1']:.3f}"
    value, share = (f"{row[name]:.3f} ± {row[f'{name}_se']:.3f}" for name in ("v1", "natural_ratio"))
    name = row["network"].replace(UNTRAINED, "random network").replace(" from constant", ", from the constant")
    return [name, value, ahead, share, paper]


def close(gaps: dict[str, float], sketch: float) -> str:
    """Say how far RandNLA is from Spectral, whichever way it came out."""
    each = ", ".join(f"{gap:+.3f} {start}".replace("-", "−") for start, gap in gaps.items())
    near = max(map(abs, gaps.values())) <= 0.02
    words = "comes within 0.02 of exact modes" if near else "does not come within 0.02 of exact modes"
    return (
        f"One round of power iteration {words}: {each}. A single sketch covers {sketch:.2f} of the exact subspace; the "
        "network averages over many."
    )


def lead(start: str, rows: list[dict[str, Any]]) -> str:
    """Say plainly where the networks of one start are beside the constant."""
    places: dict[str, list[str]] = {"ahead of": [], "level with": [], "behind": []}
    for row in rows:
        value, half = row["v1_lead"], row["v1_lead_half_width"]
        place = "ahead of" if value > half else "behind" if value < -half else "level with"
        places[place].append(row["network"].removesuffix(" from constant"))
    words = [
        f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} {place} the constant subspace"
        for place, names in places.items()
        if names
    ]
    return f"{start[0].upper()}{start[1:]}, {' and '.join(words)}, judged by the 95 % interval of the lead."


BLOCKS = {"bottleneck-spn": spn}
