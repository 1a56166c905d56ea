"""Diagnosis, accuracy of the estimators, Jacobian products and targets."""

from __future__ import annotations

import re
from typing import Any

from .common import digits, joined, pm, power, read, said, source, span, table

EXACT, KRYLOV = "diagnosis_dinov2s_exact.json", "diagnosis_dinov2s_krylov.json"
REGIMES = {"iii": "a rank-20 metric misses much of the task, but few tokens carry it"}


def diagnosis() -> str:
    layers = read(EXACT)["layers"]
    rows = [
        ["captured energy κ(20)", *(f"{pm(layer['kappa'], 1, 100)} %" for layer in layers)],
        ["effective rank of the whole spectrum", *(pm(layer["r_eff_slq"], 0) for layer in layers)],
        ["CV over tokens", *(pm(layer["cv"], 2) for layer in layers)],
        ["the same of a random direction", *(f"{layer['cv']['null']:.3f}" for layer in layers)],
        ["directions for 90 % of the energy", *(str(layer["r90"]["value"]) for layer in layers)],
        ["regime", *(f"({layer['regime']})" for layer in layers)],
        ["seconds for all images", *(f"{layer['seconds']:.1f}" for layer in layers)],
    ]
    count = len(read(EXACT)["image_files"])
    names = [f"L{layer['layer']:02d}" for layer in layers]
    same = {layer["regime"] for layer in layers}
    return joined(
        table([f"DINOv2 ViT-S/14, CLS, {count} ImageNet images", *names], rows),
        source(EXACT),
        [said(same == {"iii"}, f"Regime (iii) at every layer: {REGIMES['iii']}, so score tokens.")],
    )


def methods() -> str:
    """The exact route against block Krylov on the same images."""
    rows, within = [], []
    for exact, krylov in zip(read(EXACT)["layers"], read(KRYLOV)["layers"], strict=True):
        hits = [
            sum(
                abs(one[name] - other[name]) <= 2 * other[f"{name}_se"] + 2 * one[f"{name}_se"]
                for one, other in zip(exact["per_image"], krylov["per_image"], strict=True)
            )
            for name in ("kappa", "r_eff_slq")
        ]
        count = len(exact["per_image"])
        within += [hit / count for hit in hits]
        estimates = [
            f"{krylov[name]['mean']:.{places}f} ± {krylov[name]['estimation_se']:.{places}f}"
            for name, places in (("kappa", 4), ("r_eff_slq", 2))
        ]
        rows.append(
            [
                f"L{exact['layer']:02d}",
                f"{exact['kappa']['mean']:.4f}",
                estimates[0],
                f"{exact['r_eff_slq']['mean']:.2f}",
                estimates[1],
                f"{hits[0]} and {hits[1]} of {count}",
                f"{exact['products_per_image']:,.0f} and {krylov['products_per_image']:,.0f}",
                f"{exact['seconds']:.1f} and {krylov['seconds']:.1f}",
            ]
        )
    header = ["", "κ(20), exact", "κ(20), Krylov", "r_eff, exact", "r_eff, by quadrature"]
    header += ["images within two errors (κ, r_eff)", "products an image", "seconds"]
    return joined(
        table(header, rows),
        source(EXACT, KRYLOV),
        [said(min(within) >= 0.9, "At every layer at least nine images in ten lie within two of the printed errors.")],
    )


def cold_start() -> str:
    found = read("cold_start_cpu.json")
    rows = [
        [name, ", ".join(f"{value:.1f}" for value in found["seconds"][key]) + " s"]
        for name, key in (("from Python", "python"), ("`pullback diagnose`, with table and figures", "command"))
    ]
    what = f"{found['model']}, CLS L{found['layer']}, {found['images']} images, new process"
    return joined(table([what, "three runs"], rows), source("cold_start_cpu.json"))


NAMES = {
    "power, r0 = 20, q = 2, literal (paper default)": "power iteration, r₀ = 20, q = 2: the paper's default",
    "power, r0 = 30, q = 3, literal": "power iteration, r₀ = 30, q = 3, leading columns of the QR",
    "power, r0 = 30, q = 3, Ritz": "power iteration, r₀ = 30, q = 3, Rayleigh–Ritz",
}


def accuracy() -> str:
    document = read("accuracy_cuda.json")
    layers = list(dict.fromkeys(row["layer"] for row in document["rows"]))
    found = {(row["method"], row["layer"]): row for row in document["rows"]}
    methods = list(dict.fromkeys(row["method"] for row in document["rows"]))
    ranks = [name for name in methods if not name.startswith("trace")]
    rows = []
    for name in ranks:
        errors = [power(found[name, layer]["mean_abs_error"]) for layer in layers]
        rows.append([NAMES.get(name, name), f"{found[name, layers[0]]['pairs']:.0f}", *errors])
    traces = [
        [name.removeprefix("trace: "), *(f"{100 * found[name, layer]['mean_abs_error']:.2f} %" for layer in layers)]
        for name in methods
        if name.startswith("trace")
    ]
    names = [f"L{layer:02d}" for layer in layers]
    iterated = [found[name, layer] for name in ranks if name.startswith("power") for layer in layers]
    low = all(row["bias"] == -row["mean_abs_error"] for row in iterated)
    cheap, default = "block Krylov, b = 10, depth 5", "power, r0 = 20, q = 2, literal (paper default)"
    factor = min(found[default, at]["mean_abs_error"] / found[cheap, at]["mean_abs_error"] for at in layers)
    equal = all(found[cheap, at]["pairs"] == found[default, at]["pairs"] for at in layers)
    bias = span((-100 * found[default, at]["bias"] for at in layers), 1)
    return joined(
        table(["method", "JVP/VJP pairs", *names], rows),
        table(["trace with 100 JVPs, mean relative error", *names], traces),
        source("accuracy_cuda.json"),
        [
            said(equal and factor > 5, f"At equal cost block Krylov has less than 1/{int(factor)} of the error."),
            said(low, "Every error of power iteration is a bias: it always errs low."),
            said(True, f"The paper's default reads κ(20) too low by {bias} points."),
        ],
    )


def accuracy_again() -> str:
    """The first images on a CPU, with a small selection of methods."""
    rows = [row for row in read("accuracy_cpu.json")["rows"] if not row["method"].startswith("trace")]
    chosen = [name for name in NAMES if name.endswith("default)")] + [
        "block Krylov, b = 10, depth 5",
        "block Krylov, b = 10, depth 9",
    ]
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    found = {(row["method"], row["layer"]): power(row["mean_abs_error"]) for row in rows}
    cells = [[NAMES.get(name, name), *(found[name, layer] for layer in layers)] for name in chosen]
    count = read("accuracy_cpu.json")["images"]
    header = [f"the first {count} images, on a CPU", *(f"L{layer:02d}" for layer in layers)]
    return joined(table(header, cells), source("accuracy_cpu.json"))


RIVALS = ("jvp loop", "jvp vmap", "jvp linearize", "vjp loop", "vjp vmap")
TITLES = [
    "forward, ms",
    "JVP",
    "VJP",
    "loop of `jvp`",
    "`vmap(jvp)`",
    "`vmap(linearize)`",
    "loop of `vjp`",
    "`vmap(vjp)`",
]


def coverage() -> str:
    """How often the truth lies within two printed errors, by layer and precision."""
    names, rows, held = ("coverage_cuda.json", "coverage_cpu.json"), [], []
    for name in names:
        document = read(name)
        for layer, precision in dict.fromkeys((row["layer"], row["precision"]) for row in document["rows"]):
            found = [row for row in document["rows"] if (row["layer"], row["precision"]) == (layer, precision)]
            (blocks,) = [row for row in found if row["quantity"] == "block norms"]
            whole = [row for row in found if row["quantity"] != "block norms"]
            share = sum(row["within_2_se"] * row["count"] for row in whole) / sum(row["count"] for row in whole)
            held += [blocks["within_2_se"], share]
            emulated = " (emulated)" if precision == "tf32" and document["tf32"] == "emulated" else ""
            rows.append(
                [
                    f"{name.removeprefix('coverage_').removesuffix('.json')}, L{layer:02d}",
                    precision + emulated,
                    f"{blocks['within_2_se']:.1%} of {blocks['count']:,}",
                    f"{blocks['median_error_over_se']:.2f}",
                    f"{share:.1%}",
                ]
            )
    header = [
        "",
        "products in",
        "block norms within two errors",
        "median error / printed error",
        "numbers about all of J",
    ]
    return joined(
        table(header, rows),
        source(*names),
        [
            said(
                min(held) >= 0.9,
                "In every precision at least nine numbers in ten lie within two printed errors.",
            )
        ],
    )


def products_cuda() -> str:
    rows = []
    for case in read("products_base_cuda.json")["cases"]:
        forward, own = case["captured forward ms"], {name: case[f"captured {name} ms"] for name in ("jvp", "vjp")}
        rivals = [f"{case[f'{name} ms'] / own[name[:3]]:.3g}× ours" for name in RIVALS]
        layer = f"L{case['layer']:02d}, {case['precision']}"
        single = [f"{case[f'{name} ms'] / case['forward ms']:.2f}×" for name in ("jvp", "vjp")]
        rows.append([f"{layer}, kernels launched one by one", f"{case['forward ms']:.3f}", *single, *[""] * 5])
        ratios = [f"{own[name] / forward:.2f}×" for name in ("jvp", "vjp")]
        rows.append([f"{layer}, CUDA graphs (forward too)", f"{forward:.3f}", *ratios, *rivals])
    return joined(table(["", *TITLES], rows), source("products_base_cuda.json"))


def products_precision() -> str:
    document = read("products_base_cuda_back_to_back.json")
    rows = []
    for name, title in (("float32", "float32"), ("tf32", "TF32"), ("bf16", "bf16 (blocks only; forward in TF32)")):
        (case,) = [
            own
            for own in document["cases"]
            if (own["layer"], own["precision"], own["tangents"], own["images"]) == (2, name, 20, 1)
        ]
        ratios = [f"{case[f'{kind} ms'] / case['forward ms']:.2f}×" for kind in ("jvp", "vjp")]
        errors = [
            " / ".join(power(document["relative_errors"][layer][name][kind]) for kind in ("jvp", "vjp"))
            for layer in ("L02", "L10")
        ]
        rows.append([title, f"{case['forward ms']:.3f}", *ratios, *errors])
    header = ["precision, L02", "forward, ms", "JVP", "VJP", "relative error of JVP / VJP, L02", "the same, L10"]
    name = "products_base_cuda_back_to_back.json"
    return joined(table(header, rows), source(name), growth(name, "captured "))


def growth(name: str, prefix: str = "") -> str:
    """Time per product against tangents and images, at L02."""
    cases = [case for case in read(name)["cases"] if case["layer"] == 2]
    cases = [case for case in cases if case["precision"] in ("tf32", "float32")][-5:]
    cells = [f"{case[f'{prefix}jvp ms'] / case[f'{prefix}forward ms']:.2f}×" for case in cases]
    header = ["images × tangents, L02", *(f"{case['images']} × {case['tangents']}" for case in cases)]
    return table(header, [["one JVP against one forward", *cells]])


def products_cpu() -> str:
    rows = []
    for case in read("products_small_cpu.json")["cases"]:
        if "jvp loop ms" not in case:
            continue
        ratios = [f"{case[f'{name} ms'] / case['forward ms']:.2f}×" for name in ("jvp", "vjp")]
        rivals = [f"{case[f'{name} ms'] / case[f'{name[:3]} ms']:.1f}× ours" for name in RIVALS]
        rows.append([f"L{case['layer']:02d}", f"{case['forward ms']:.2f}", *ratios, *rivals])
    name = "products_small_cpu.json"
    return joined(table(["", *TITLES], rows), source(name), growth(name))


PRINTED = re.compile(r"(\S+):(\d+) +(\w+) +(\w+) +([\d.]+) images/s, (\d+) products, .* off by (\S+)(.*)")


def printed_targets() -> list[dict[str, Any]]:
    """The rows of the run whose printed lines were kept, without those of a version that was given up."""
    found = []
    for line in read("targets_cuda_printed.txt").splitlines():
        match = PRINTED.match(line)
        if match and "columns" not in match[8]:
            size, layer, method, precision, rate, products, error, _ = match.groups()
            row = dict(size=size, layer=int(layer), method=method, precision=precision, rate=float(rate))
            found.append(row | dict(products=int(products), error=float(error)))
    return found


def targets_rates() -> list[tuple[str, float, int, float]]:
    """What, images/s, products, error of the median token; an asterisk marks the run whose lines were kept."""
    rows = []
    for row in read("targets_cuda.json")["cases"]["base:10"]["targets"]:
        name = f"L10, {row['method']}, {row['precision']}"
        count = sum(row["products_per_image"].values())
        rows.append((name, row["images_per_second"], count, row["errors"]["imp, relative, median token"]))
    for row in printed_targets():
        if (row["layer"], row["method"]) != (10, "exact"):  # measured again above
            name = f"L{row['layer']:02d}, {row['method']}, {row['precision']} *"
            rows.append((name, row["rate"], row["products"], row["error"]))
    return rows


def targets_cuda() -> str:
    rows = [[name, digits(rate), str(count), power(error)] for name, rate, count, error in targets_rates()]
    header = ["DINOv2-B, random weights", "images/s", "products an image", "imp* of the median token off by"]
    return joined(table(header, rows), source("targets_cuda.json") + ", \\* " + source("targets_cuda_printed.txt"))


def targets_million() -> str:
    end = read("targets_cuda.json")["cases"]["base:10"]["end to end"]["images_per_second"]
    rates = [(name, rate) for name, rate, *_ in targets_rates()]
    rates.insert(2, ("L10, exact, tf32, from JPEG files to the store", end))
    rows = [[name, digits(rate), *(duration(1e6 / rate / gpus) for gpus in (1, 8, 64))] for name, rate in rates]
    size = read("targets_cuda.json")["cases"]["base:10"]["end to end"]["bytes_per_row"]
    reading = [
        read(name)["cases"][case]["reading_ms"]
        for name, case in (("targets_cuda.json", "base:10"), ("targets_cpu_dinov2s.json", "dinov2-small:10"))
    ]
    return joined(
        table(["a million images", "images/s", "1 GPU", "8 GPUs", "64 GPUs"], rows),
        f"8 and 64 GPUs are the rate of one, multiplied. A row takes {size:,.0f} bytes in a full shard (N = 257, r = "
        "20), a "
        f"million rows {size / 1e3:.1f} GB; reading one 500 × 375 JPEG takes {span(reading, 0)} ms of one CPU core.",
    )


def duration(seconds: float) -> str:
    if seconds < 3600:
        return f"{digits(seconds / 60, 2)} min"
    return f"{seconds / 3600:.1f} h"


def targets_cpu() -> str:
    rows, ends, naive = [], [], []
    for name, weights in (("targets_cpu_dinov2s.json", "real"), ("targets_cpu.json", "random")):
        (case,) = read(name)["cases"].values()
        for row in case["targets"]:
            errors = row["errors"]
            rows.append(
                [
                    weights,
                    row["method"],
                    f"{row['images_per_second']:.2f}",
                    str(sum(row["products_per_image"].values())),
                    *(power(errors[f"imp, relative, {key}"]) for key in ("in norm", "median token", "worst token")),
                    power(errors["block norms, relative se"]),
                ]
            )
        ends.append(f"{case['end to end']['images_per_second']:.1f} images/s with {weights} weights")
        naive.append(f"{case['naive']['ratio']:.0f} times as long with {weights} weights")
    header = ["weights", "method", "images/s", "products", "imp* in norm", "median token", "worst token"]
    return joined(
        table([*header, "block norms, relative se"], rows),
        source("targets_cpu_dinov2s.json", "targets_cpu.json"),
        [
            f"- From files to a store on disk (`auto`, here krylov): {' and '.join(ends)}.",
            "- A naive loop, one `torch.func.vjp` and a pullback per row of J and then a dense SVD, takes "
            f"{' and '.join(naive)}, in the same run.",
        ],
    )


BLOCKS = {
    "diagnosis": diagnosis,
    "diagnosis-methods": methods,
    "cold-start": cold_start,
    "accuracy": accuracy,
    "accuracy-cpu": accuracy_again,
    "coverage": coverage,
    "products-cuda": products_cuda,
    "products-precision": products_precision,
    "products-cpu": products_cpu,
    "targets-cuda": targets_cuda,
    "targets-million": targets_million,
    "targets-cpu": targets_cpu,
}
