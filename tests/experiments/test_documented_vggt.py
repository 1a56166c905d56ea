"""The tables that docs/vggt.md and docs/vggt-pruning.md show of tiny-views are those of the result files."""

import json
import statistics
from pathlib import Path

import pytest

from pullback.backbones import load_any_backbone
from pullback.experiments.camera_spn import CONSTANT
from pullback.experiments.scene_taxonomy import COLUMNS, _stated
from pullback.runs.provenance import weights_hash

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def document(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def taxonomy() -> list[str]:
    """One row per measurement and, under it, the paper's where it has one."""
    found = [f"| probe | {' | '.join(title for title, _, _ in COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in lines("scene_taxonomy_tiny_views_cuda.jsonl"):
        place = "x_vis" if row["layer"] is None else f"L{row['layer']:02d}"
        found.append(f"| {row['decoder']} {place} | {' | '.join(cell(row) for _, _, cell in COLUMNS)} |")
        if row["paper"] is not None:
            where = f"L{row['paper']['layer']:02d}" if "layer" in row["paper"] else "x_vis"
            cells = " | ".join(_stated(row["paper"], name) for _, name, _ in COLUMNS)
            found.append(f"| *paper, {where}* | {cells} |")
    return found


def camera_metric() -> list[str]:
    wide, narrow = (lines(f"camera_metric_tiny_views{part}_cpu.jsonl") for part in ("", "_rank4"))

    def cell(rows: list[dict], name: str, digits: int = 3) -> str:
        values = [row[name] for row in rows]
        error = statistics.stdev(values) / len(values) ** 0.5
        return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"

    return [
        "| | Euclidean | SO(3)-aware | paper, both |",
        "|---|---|---|---|",
        f"| κ(16) | {cell(wide, 'kappa_euclidean')} | {cell(wide, 'kappa_so3')} | 0.99 |",
        f"| κ(4) | {cell(narrow, 'kappa_euclidean')} | {cell(narrow, 'kappa_so3')} | – |",
        f"| effective rank | {cell(wide, 'effective_rank_euclidean', 2)} | {cell(wide, 'effective_rank_so3', 2)} | – |",
        "",
        "| the two importances | all tokens | patches | paper |",
        "|---|---|---|---|",
        f"| Spearman's ρ | {cell(wide, 'spearman_all')} | {cell(wide, 'spearman_patches')} | 0.995 |",
        f"| 50 % sets agree on | {cell(wide, 'agreement_all')} | {cell(wide, 'agreement_patches')} | 0.97 |",
    ]


def camera_spn() -> list[str]:
    found = [
        "| network | V₁ ↑ | lead | V₁, patches ↑ | lead | natural ratio ↑ | paper* |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document("camera_spn_tiny_views_cuda.json")["rows"]:
        cells = []
        for name in ("v1", "v1_patches"):
            lead = f"{row[f'{name}_lead']:+.3f} ± {row[f'{name}_lead_half_width']:.3f}"
            cells += [f"{row[name]:.3f}", "" if row["network"] == CONSTANT else lead]
        ratio = f"{row['natural_ratio']:.3f} ± {row['natural_ratio_se']:.3f}"
        found.append(f"| {row['network']} | {' | '.join(cells)} | {ratio} | {stated(row)} |")
    return found


def points_taken_apart() -> list[str]:
    places = [document("vggt_spectra_cpu.json")["means"][f"points {place}"] for place in ("L04", "x_vis")]
    names = [name for name in places[0] if name.startswith("r_eff, ")]
    rows = []
    for name in names:
        cells = [f"{own[name]['mean']:.1f} ± {own[name]['se']:.1f}" for own in places]
        rows.append(f"| {name.removeprefix('r_eff, ')} | {' | '.join(cells)} |")
    return ["| effective rank of points | L04 | x_vis |", "|---|---|---|", *rows]


def stated(row: dict) -> str:
    value = row["paper_v1_of_compressed_depth"]
    return "" if value is None else f"{value:.3f}"


def full_size() -> list[str]:
    found = [
        "| head | M | products | diagnosis | JVP, VJP each | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in document("vggt_full_cuda.json")["rows"]:
        place = "x_vis" if row["layer"] == "hooks" else f"L{row['layer']}"
        products = f"{row['jvps per scene']} JVP, {row['vjps per scene']} VJP"
        times = f"{row['diagnosis s']:.1f} s | {row['jvp ms']:.1f}, {row['vjp ms']:.1f} ms"
        found.append(
            f"| {row['decoder']} {place} | {row['outputs']:,} | {products} | {times} | {row['peak GB']:.1f} GB |"
        )
    return found


def pruning() -> list[str]:
    names = ("rotation change deg", "translation change deg", "depth change", "rotation error deg")
    found = [
        "| removed | rule | rotation ° ↓ | translation ° ↓ | depth % ↓ | error of rotation ° ↓ | δ1 ↑ |",
        "|---|---|---|---|---|---|---|",
    ]
    result = document("vggt_pruning_tiny-views_16views_cuda.json")
    measured = {(row["ratio"], row["rule"]): row for row in result["rows"]}
    # strided merging within views could not go beyond 70 % then
    others = document("vggt_pruning_tiny-views_16views_within_cpu.json")["rows"]
    added = [row for row in others if (row["ratio"], row["rule"]) not in measured]
    rows = sorted([*result["rows"], *added], key=lambda row: row["ratio"])
    for row in [{"rule": "none", "ratio": 0, **result["unpruned"]}, *rows]:
        cells = []
        for name in names:
            mean, error = ((100 if name == "depth change" else 1) * row[name][key] for key in ("mean", "se"))
            cells.append(f"{mean:.2f} ± {error:.2f}" if row["rule"] != "none" or "error" in name else "0")
        found.append(f"| {row['ratio']:.0%} | {row['rule']} | {' | '.join(cells)} | {row['delta1']['mean']:.3f} |")
    return found


def pruning_choices() -> list[str]:
    names = ("rotation change deg", "depth change")
    found = [
        "| variant | `global`: rotation ° ↓ | depth % ↓ | `view`: rotation ° ↓ | depth % ↓ |",
        "|---|---|---|---|---|",
    ]
    rows = document("vggt_rules_tiny-views_cpu.json")["rows"]
    places = {(row["scope"], row["score"], row["variant"]): row for row in rows}
    for score, variant in dict.fromkeys((row["score"], row["variant"]) for row in rows if row["scope"] == "view"):
        own = [places.get((scope, score, variant)) for scope in ("global", "view")]
        cells = [
            f"{(1, 100)[name == names[1]] * row[name]['mean']:.2f}" if row else "–" for row in own for name in names
        ]
        label = {"preset": "`best`"}.get(variant, variant) if score == "random" else "strided merging"
        found.append(f"| {label} | {' | '.join(cells)} |")
    return found


def pruning_costs() -> list[str]:
    """The same rules on the CPU and on the network of full size."""
    found = ["| removed | rule | tiny-views, 16 views, CPU | full size, 32 views | memory |", "|---|---|---|---|---|"]
    small, full = (
        document(f"vggt_pruning_{name}.json") for name in ("tiny-views_16views_cpu", "full_32views_518px_cuda")
    )
    known = {(row["rule"], row["ratio"]): row for row in full["rows"]}
    bare = full["unpruned"]
    found.append(f"| 0% | none | {small['unpruned']['ms']:,.0f} ms | {bare['ms']:,.0f} ms | {bare['peak GB']:.2f} GB |")
    for row in small["rows"]:
        other = known.get((row["rule"], row["ratio"]))
        cells = f"{other['speedup']:.2f}× | {other['peak GB']:.2f} GB" if other else "– | –"
        found.append(f"| {row['ratio']:.0%} | {row['rule']} | {row['speedup']:.2f}× | {cells} |")
    return found


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("vggt", taxonomy),
        ("vggt", points_taken_apart),
        ("vggt", camera_metric),
        ("vggt", camera_spn),
        ("vggt", full_size),
        ("vggt-pruning", pruning),
        ("vggt-pruning", pruning_choices),
        ("vggt-pruning", pruning_costs),
    ],
    ids=["taxonomy", "points", "camera metric", "camera SPN", "full size", "pruning", "choices", "costs of pruning"],
)
def test_the_page_shows_the_measured_table(page, table):
    assert "\n".join(table()) in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def test_results_belong_to_the_shipped_weights():
    """Measure again where the weights have changed."""
    own = weights_hash(load_any_backbone("tiny-views", device="cpu").model)
    assert {row["weights"] for row in lines("scene_taxonomy_tiny_views_cuda.jsonl")} == {own}
    assert document("camera_spn_tiny_views_cuda.json")["settings"]["weights"] == own
