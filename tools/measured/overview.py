"""The README's table of headline results, and the list of all result files."""

from __future__ import annotations

from .common import RESULTS, UNCOMMITTED, digits, facts, joined, pm, power, read, table
from .geometry import EXACT
from .learning import CLS, DROPOUT, REFINED, rho
from .pruning import HEADS, cls_file, rules
from .retrieval import METHODS, best_of, cell
from .retrieval import RESULT as RETRIEVAL
from .vggt import VIEWS

MARK = "†"


def marked(text: str, *names: str) -> str:
    """Put a mark on a figure that comes from a file of an uncommitted tree."""
    return f"{text} {MARK}" if any(UNCOMMITTED in facts(name)["commit"] for name in names) else text


def headline() -> str:
    rows = [*geometry_rows(), *learning_rows(), *retrieval_rows(), *pruning_rows(), *vggt_rows()]
    header = ["what", "result", "compared with", "measured on"]
    notes = [f"{MARK} from a result file that was made from an uncommitted tree."] if MARK in str(rows) else []
    return joined(table(header, rows), *notes)


def geometry_rows() -> list[list[str]]:
    last = read(EXACT)["layers"][-1]
    accuracy = {(row["method"], row["layer"]): row["mean_abs_error"] for row in read("accuracy_cuda.json")["rows"]}
    ours, paper = "block Krylov, b = 10, depth 5", "power, r0 = 20, q = 2, literal (paper default)"
    case = read("products_base_cuda.json")["cases"][0]
    forward = case["captured forward ms"]
    ratios = [f"{case[f'captured {name} ms'] / forward:.2f}×" for name in ("jvp", "vjp")]
    loops = [f"{case[f'{name} loop ms'] / case[f'captured {name} ms']:.0f}×" for name in ("jvp", "vjp")]
    target = read("targets_cuda.json")["cases"]["base:10"]["targets"][0]
    return [
        [
            f"κ(20) of the class token, L{last['layer']}",
            f"{pm(last['kappa'], 1, 100)} %",
            "",
            f"DINOv2-S, {last['num_images']} images, H200, float32, {last['seconds']:.1f} s",
        ],
        [
            "error of κ(20) with 50 pairs of products, L2",
            power(accuracy[ours, 2]),
            f"{power(accuracy[paper, 2])}, the paper's power iteration",
            "DINOv2-S",
        ],
        [
            "one JVP, one VJP, L2",
            f"{ratios[0]}, {ratios[1]} a batched forward",
            f"loops of `torch.func`: {loops[0]}, {loops[1]} ours",
            "DINOv2-B, random weights, H200, TF32",
        ],
        [
            f"{target['method']} targets, L10",
            f"{digits(target['images_per_second'])} images/s",
            "",
            f"DINOv2-B, random weights, H200, {target['precision'].upper()}",
        ],
    ]


def learning_rows() -> list[list[str]]:
    heads, best = read(CLS), max(read(REFINED), key=lambda line: line["rho"])
    early = read(DROPOUT)["heads"]["3-512x3"]["importance"]
    base = heads["baselines"]
    values = [
        ("10", "256 × 1", best, base["L10"]),
        ("6", "256 × 2", heads["heads"]["6-256x2"]["importance"], base["L06"]),
        ("3", "512 × 3", early, base["L03"]),
    ]
    return [
        [
            f"ρ of an importance head ({size}), L{layer}",
            rho(found),
            f"{known['mean map']['rho']:.2f}, the mean map",
            f"DINOv2-S CLS, {heads['held_out_images']} unseen images",
        ]
        for layer, size, found, known in values
    ]


def retrieval_rows() -> list[list[str]]:
    found = []
    for case, layer, name in (("depth", 10, "DINOv2-S depth"), ("scenes", 8, "`tiny-scenes` depth")):
        part = next(iter(cell(case, layer)["sets"].values()))
        best = best_of(part)
        rho = {method: part["methods"][method]["spearman_pairs"] for method in ("drm", best)}
        others = f"{rho[best]:.3f}, {METHODS[best]}"
        what = f"ρ of learned distances with the decoder's own, L{layer}"
        found.append([what, marked(f"{rho['drm']:.3f}", RETRIEVAL), others, f"{name}, {part['images']} unseen images"])
    return found


def pruning_rows() -> list[list[str]]:
    rows = []
    for layer in ("L06", "L03"):
        name = cls_file(layer)
        found, document = rules(name), read(name)
        ours, paper, bipartite = (
            digits(found[key]["mean"])
            for key in (("best", "importance", 0.5), ("paper", "importance", 0.5), ("bipartite", "bipartite", 0.5))
        )
        rows.append(
            [
                f"half of the tokens gone after block {document['stages'][0]}, cosine × 100",
                marked(ours, name),
                f"{paper}, the paper's rule; {bipartite}, ToMe's matching in one stage",
                f"DINOv2-S CLS, {document['images']} unseen images, head {HEADS[document['head'][0]]}",
            ]
        )
    name = "prune_tiny_scenes_depth_L04_head.json"
    found, document = rules(name), read(name)
    rows.append(
        [
            "half gone after block 4, depth SILog × 100",
            marked(digits(found["best", "importance", 0.5]["mean"]), name),
            f"{digits(found['paper', 'importance', 0.5]['mean'])}, the paper's rule; "
            f"{digits(found['bipartite', 'bipartite', 0.5]['mean'])}, ToMe's matching in one stage",
            f"`tiny-scenes`, {document['images']} unseen scenes, head {HEADS[document['head'][0]]}",
        ]
    )
    cases = {
        (case["pixels"], case["batch"], case["head"]): case
        for case in read("pruning_speed_cuda.json")["cases"]
        if case["schedule"].startswith("half")
    }
    own = digits(rules("prune_dinov2s_cls_L03_256x1.json")["best", "importance", 0.5]["mean"])
    rows.append(
        [
            "speed with half gone after block 3, head 256 × 1",
            f"{cases[518, 64, '256x1']['speedup']:.2f}× (64 images of 518 px)",
            f"{cases[224, 1, '256x1']['speedup']:.2f}× for one image of 224 px; costs DINOv2-S {own} (cosine × 100)",
            "DINOv2-B, random weights, H200, bf16, compiled",
        ]
    )
    return rows


def vggt_rows() -> list[list[str]]:
    small, large = read(VIEWS), read("vggt_pruning_full_32views_518px_parts_cuda.json")
    turned = {row["rule"]: row["rotation change deg"] for row in small["rows"] if row["ratio"] == 0.5}
    speed = {row["rule"]: row["speedup"] for row in large["rows"] if row["ratio"] == 0.5}
    own = small["unpruned"]["rotation error deg"]
    return [
        [
            "VGGT with half of the tokens gone around global attention: cameras turn by",
            f"{pm(turned['random, global'], 2)}°",
            f"{pm(turned['strided merging, global'], 2)}°, strided merging; own error {own['mean']:.2f}°",
            f"`tiny-views`, {small['scenes']} unseen scenes of {small['timed'][1]} views",
        ],
        [
            "speed of the same, and within views",
            f"{speed['random, global']:.2f}×, {speed['random, view']:.2f}×",
            f"{speed['strided merging, global']:.2f}×, {speed['strided merging, view']:.2f}×, strided merging",
            f"VGGT of full size, random weights, {large['timed'][1]} views of {large['timed'][-1]} px, H200, bf16",
        ],
    ]


def files() -> str:
    """Every result file with what it says about itself."""
    rows = []
    for path in sorted(RESULTS.iterdir()):
        found = facts(path.name)
        cells = [found[key] or "–" for key in ("machine", "precision", "date", "commit")]
        rows.append([f"`{path.name}`", *cells])
    dirty = [path.name for path in sorted(RESULTS.iterdir()) if UNCOMMITTED in facts(path.name)["commit"]]
    return joined(
        table(["file", "machine", "precision", "date", "commit"], rows),
        f"{len(dirty)} of {len(rows)} files were made from an uncommitted tree: "
        f"{', '.join(f'`{name}`' for name in dirty)}.",
    )


BLOCKS = {"headline": headline, "files": files}
