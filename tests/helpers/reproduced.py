"""A folder of `pullback reproduce` made by hand, in small: every kind of figure, verdict and reason for no number."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pullback.runs import documents as files
from pullback.runs.files import make_folder, write_arrays, write_json
from pullback.runs.rows import Rows

RATIOS = ("0.05", "0.10", "0.20", "0.30", "0.50")
LACKS = "not at this scale: it has no dinov2 and no photos"
EXPERIMENTS = ("taxonomy", "cls-pruning", "importance-maps", "dense-pruning", "output-metric")
NASTY = "<script>alert('ρ & \"κ\"')</script> | *a_b*"
"""A text that would break a page or a table that did not escape it."""


def write_reproduced(folder: Path, *, scale: str = "tiny", seed: int = 0, shift: float = 0.0, side: int = 64) -> Path:
    """Write five finished experiments. ``shift``: is added to the numbers of ratios from 0.30 on, and decides a claim;
    ``side``: of pictures, in pixels."""
    roles = {"tiny-scenes": "tiny-scenes", "dinov2": None, "scenes": "drawn", "photos": None}
    write_json(make_folder(folder) / files.REPRODUCE, {"scale": scale, "seed": seed, **roles})
    for write in (_taxonomy, _cls_pruning, _importance_maps, _dense_pruning, _output_metric):
        write(folder, scale, seed, shift, side)
    return folder


def _taxonomy(folder: Path, scale: str, seed: int, shift: float, side: int) -> None:
    columns = [
        _column("κ(20)", percent=True, better="higher"), _column("CV"), _column("r_eff", digits=2),
        _column("regime", digits=1),
    ]  # fmt: skip
    ours = {"tiny-scenes CLS, L10": (0.912, 1.31, 14.2, 2), "tiny-scenes depth, L02": (0.634, 0.226, 61.0, 1)}
    paper = {"DINOv2 CLS, L10": (0.3336, 4.06, 270.2, 3), "VGGT camera, L16": ("≈ 100 %", "N/A", 9, 4)}
    rows = []
    for name, values in {**paper, **ours}.items():
        for column, value in zip(columns, values, strict=True):
            place = ("diagnostic", name, column["name"])
            if name in paper:
                rows.append(_row(place, None, paper=value, absent=LACKS, scale=scale, seed=seed))
            else:
                width = 0.03 * value if column["name"] != "regime" else None
                rows.append(_row(place, value, width, scale=scale, seed=seed, count=20))
    rows[-2] |= {"note": "of the first 200 directions"}
    rows[-1] |= {"value": None, "absent": "not a finite number", "low": None, "high": None}
    random = np.random.default_rng(0)
    spectra = {name: np.exp(-np.arange(20) / fall) * random.uniform(0.9, 1.1, (6, 20)) for name, fall in
               (("tiny-scenes CLS, L10", 4.0), ("tiny-scenes depth, L02", 9.0))}  # fmt: skip
    _write(
        folder, "taxonomy", rows, columns, scale, seed, title="Four regimes", label="tab:regime_taxonomy",
        about=f"How many directions a decoder notices. {NASTY}",
        claims=[
            ("DINOv2 CLS keeps a third in 20 directions.", "not at this scale", "There is no dinov2."),
            ("Scores suffice where CV is high.", "holds partly", "tiny-scenes: CV 1.31 at L10, 0.226 at L02."),
        ],
        figures=[_figure("spectra", "spectrum", "Singular values by layer", log=True)],
        footnotes=["The paper’s CV of 0.026 is that of random directions, 1/√(2D) = 0.0255."],
        arrays={"spectra": spectra},
    )  # fmt: skip


def _cls_pruning(folder: Path, scale: str, seed: int, shift: float, side: int) -> None:
    columns = [_column(ratio, unit="× 100", better="lower") for ratio in RATIOS]
    columns += [_column("GFLOPs", digits=3, better="lower"), _column("ms", unit="ms", digits=2, better="lower")]
    rules = {"Random": 1.0, "ToMe score": 1.4, "Importance": 0.12}
    printed = (0.17, 0.36, 0.86, 1.49, 3.44)
    rows, times = [], []
    for name, factor in rules.items():
        for place, (ratio, known) in enumerate(zip(RATIOS, printed, strict=True)):
            value = factor * known * (1.0 + (shift if float(ratio) >= 0.3 else 0.0))
            row = ("degradation", f"tiny-scenes: {name}", ratio)
            rows.append(_row(row, value, 0.08 * value, paper=known if name == "Random" else None, scale=scale,
                             seed=seed, count=32))  # fmt: skip
            kept = 1 - float(ratio)
            rows.append(_row(("operations", f"{name} · {ratio}", "0.05"), value, scale=scale, seed=seed, count=32))
            rows.append(_row(("operations", f"{name} · {ratio}", "GFLOPs"), 0.9 * kept + 0.1, scale=scale, seed=seed))
            times.append(_row(("time", f"{name} · {ratio}", "ms"), 7 * kept + place / 10, 0.2, scale=scale, seed=seed))
    for ratio in RATIOS:
        rows.append(_row(("degradation", "DINOv2-B: Importance", ratio), None, paper=0.25, absent=LACKS, scale=scale,
                         seed=seed))  # fmt: skip
    holds = "holds" if not shift else "does not hold"
    _write(
        folder, "cls-pruning", rows, columns, scale, seed, title="Class tokens under pruning", label="tab:cls_pruning",
        about="Cosine distance of the class embedding from that of all tokens.",
        claims=[
            ("Importance has the lowest degradation at every ratio.", holds, "tiny-scenes: 0.41 against 4.8 at 0.50."),
            ("ToMe’s score is worse than random.", "does not hold", "tiny-scenes: the intervals overlap at 0.05."),
        ],
        figures=[
            _figure("ratios", "curves", "Degradation by ratio", table="degradation", log=True, x="share removed"),
            _figure("operations", "scatter", "Degradation by operations", table="operations", x="GFLOPs", y="0.05"),
        ],
        times=times,
    )  # fmt: skip


def _importance_maps(folder: Path, scale: str, seed: int, shift: float, side: int) -> None:
    pictures = _pictures(3, side)
    exact = pictures[:, :: side // 8, :: side // 8].astype(float).std(-1) + np.arange(64).reshape(8, 8) / 64
    random = np.random.default_rng(1)
    head, tome = exact + random.normal(0, 8, exact.shape), random.random(exact.shape)
    rho = np.array([[np.nan] * 3, [0.93, 0.88, 0.71], [-0.12, 0.05, 0.2]])
    rows = [
        _row(("agreement", f"picture {i}", "ρ of the head"), float(rho[1, i]), scale=scale, seed=seed) for i in range(3)
    ]
    _write(
        folder, "importance-maps", rows, [_column("ρ of the head", digits=2, better="higher")], scale, seed,
        title="Which patches matter", label="fig:depth_importance", about="Importance of three pictures.",
        claims=[("The head agrees with the target.", "holds", "ρ is 0.71 to 0.93.")],
        figures=[_figure("maps", "maps", "Importance over pictures", about="The target, the head, and ToMe’s score.")],
        arrays={"maps": {"pictures": pictures, "names": np.array(["imp*", "head", "ToMe"]),
                         "maps": np.stack([exact, head, tome]), "rho": rho}},
    )  # fmt: skip


def _dense_pruning(folder: Path, scale: str, seed: int, shift: float, side: int) -> None:
    pictures = _pictures(2, side)
    before = np.linspace(1, 9, side)[:, None] + np.linspace(0, 2, side) + pictures[..., 0] / 255
    after = before + 0.4 * np.sin(np.arange(side) / 5)
    rows = [_row(("SILog", f"stages {stages}", "0.50"), 3.0 / (i + 1), 0.1, paper=paper, scale=scale, seed=seed)
            for i, (stages, paper) in enumerate((("[4]", 3.08), ("[4, 8]", None)))]  # fmt: skip
    _write(
        folder, "dense-pruning", rows, [_column("0.50", unit="× 100", better="lower")], scale, seed,
        title="Depth under pruning", label="tab:dpt_pruning", about="Additional SILog.", claims=[],
        figures=[_figure("depth", "wipe", "Depth before and after", about="A ratio of 0.50.")],
        arrays={"depth": {"pictures": pictures, "before": before, "after": after,
                          "captions": np.array(["η = 0.50", f"η = 0.50, {NASTY}"])}},
    )  # fmt: skip


def _output_metric(folder: Path, scale: str, seed: int, shift: float, side: int) -> None:
    patches = np.arange(64)
    row, column = patches // 8, patches % 8
    distance = np.abs(row[:, None] - row) + np.abs(column[:, None] - column) + 0.01 * patches  # [patches, patches]
    task = np.argsort(distance + 100 * np.eye(64), 1)[:, :5]
    cosine = np.argsort(np.abs(row[:, None] - row) * 9 + distance + 999 * np.eye(64), 1)[:, :5]
    nearest = np.stack([task, cosine])[:, None].repeat(2, 1)  # [2, n, patches, k]
    rows = [_row(("overlap", "tiny-scenes", "of five"), float((task == cosine).sum(1).mean()), scale=scale, seed=seed)]
    _write(
        folder, "output-metric", rows, [_column("of five", digits=2)], scale, seed, title="Neighbours of a patch",
        label="sec:riemannian_review", about="Two distances, two neighbourhoods.", claims=[],
        figures=[_figure("near", "neighbours", "Neighbours of a patch")],
        arrays={"near": {"pictures": _pictures(2, side), "grid": np.array([8, 8]),
                         "names": np.array(["d_task", "cosine"]), "nearest": nearest}},
    )  # fmt: skip


def edit_rows(folder: Path, experiment: str, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change the rows of an experiment one by one; None removes one."""
    path = folder / experiment / files.ROWS
    changed = [change(row) for row in Rows(path).read()]
    path.unlink()
    Rows(path).add([row for row in changed if row is not None])


def _write(
    folder: Path, name: str, rows: list[dict], columns: list[dict], scale: str, seed: int, *, title: str, label: str,
    about: str, claims: Iterable[tuple[str, str, str]], figures: list[dict], footnotes: Iterable[str] = (),
    arrays: dict[str, dict[str, np.ndarray]] | None = None, times: Iterable[dict] = (),
) -> None:  # fmt: skip
    times = list(times)
    document = {
        "name": name, "title": title, "paper_label": label, "about": about,
        "command": f"pullback reproduce {name} --scale {scale} --out DIR", "columns": columns,
        "places": [[row["table"], row["row"], row["column"]] for row in (*rows, *times)],
        "claims": [
            {"sentence": said, "where": label, "word": word, "why": why, "stand_in": word in ("holds", "holds partly"),
             "on": [] if word == "not at this scale" else ["tiny-scenes"]}
            for said, word, why in claims
        ],
        "footnotes": list(footnotes), "figures": figures, "scale": scale, "substitutes": {}, "seed": seed,
        "date": "2026-01-01", "machine": "a machine, 1 thread", "pullback": "0",
    }  # fmt: skip
    own = make_folder(folder / name)
    write_json(own / files.EXPERIMENT, document)
    Rows(own / files.ROWS).add(rows)
    if times:
        Rows(own / files.TIMES).add(times)
    for figure, content in (arrays or {}).items():
        write_arrays(make_folder(own / "arrays") / f"{figure}.npz", content)


def _column(name: str, *, better: str = "neither", unit: str = "", digits: int = 3, percent: bool = False) -> dict:
    return {"name": name, "better": better, "unit": unit, "digits": digits, "percent": percent}


def _figure(name: str, kind: str, title: str, **others: Any) -> dict:
    return {
        "name": name,
        "kind": kind,
        "title": title,
        "about": "",
        "table": "",
        "x": "",
        "y": "",
        "log": False,
        **others,
    }


def _row(
    place: tuple[str, str, str], value: float | None, width: float | None = None, *, scale: str, seed: int,
    paper: float | str | None = None, absent: str | None = None, count: int | None = None,
) -> dict:  # fmt: skip
    table, row, column = place
    return {
        "table": table, "row": row, "column": column, "value": value,
        "low": None if value is None or width is None else value - width,
        "high": None if value is None or width is None else value + width,
        "paper": paper, "absent": absent, "count": count, "over": None if value is None else "images", "note": None,
        "cell": f"{table} {row}", "seed": seed, "model": None if absent else "tiny-scenes",
        "weights": None if absent else "0123456789abcdef", "data": "scenes", "scale": scale, "commit": "abc1234",
        "machine": "a machine, 1 thread",
    }  # fmt: skip


def _pictures(count: int, side: int) -> np.ndarray:
    """Draw a disc in front of a gradient, another one in each picture."""
    y, x = np.mgrid[:side, :side] / side
    drawn = []
    for place in range(count):
        disc = (x - 0.3 - 0.2 * place) ** 2 + (y - 0.5) ** 2 < 0.05
        drawn.append(
            np.where(disc[..., None], (230, 160 - 40 * place, 40), np.stack([90 * x, 150 * y, 120 + 60 * x], -1))
        )
    return np.stack(drawn).astype(np.uint8)
