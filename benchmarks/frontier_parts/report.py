"""What a study of `frontier.py` found, as result files: points and tests, how each was tuned, neighbours."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from measure import RESULTS, save
from safetensors import safe_open

from pullback.evaluation.statistics import bootstrap_mean, bootstrap_share, compare_paired, mcnemar_p
from pullback.pruning.pareto import NEIGHBOURS

OURS, OWN_SIZE = "planned", "planned, own size"
MACHINE = "machine.json"  # of the neighbours
EXPECTED = "expected"  # folder: of each plan that was searched, where it was found and what it should lose
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"


def report(options: argparse.Namespace) -> None:
    """Write what a study found as result files, frontier_STUDY_NAME_DEVICE.json, with STUDY the name of the folder
    WORK, and with ``--figure NAME`` the figure of one of them."""
    work, out = Path(options.work), options.out or RESULTS
    for path in sorted((work / "pareto").glob("*/pareto.json")):
        document = json.loads(path.read_text())
        content = compact(document) | {"tuning": tunings(work)} | rounded({"contests": contests(work, path.parent)})
        content["expected"] = rounded(expectations(work))
        name = f"frontier_{work.name}_{path.parent.name}_{document['device']}"
        print(f"[frontier] {save(name, content, out)}")
        if path.parent.name == options.figure:
            from pullback.report.pareto_figures import pareto_png  # with matplotlib, which a GPU machine may lack

            image = IMAGES / "frontier.png" if options.out is None else out / "frontier.png"
            image.write_bytes(pareto_png(document, dpi=100))
    if (work / "neighbours" / MACHINE).is_file():
        content = {"machine": json.loads((work / "neighbours" / MACHINE).read_text())}
        content["rows"] = neighbour_rows(work / "neighbours")
        print(f"[frontier] {save(f'frontier_{work.name}_neighbours_cuda', content, out)}")


def tunings(work: Path) -> dict[str, dict[str, Any]]:
    """Return how each point was tuned, by the name of its folder, with the error on the tenth of the training pictures
    that judged, before and after."""
    found = {}
    for path in sorted((work / "tuned").glob("[!.]*/vectors.safetensors")):
        with safe_open(path, framework="pt") as file:
            found[path.parent.name] = json.loads(file.metadata()["record"])
    return rounded(found)


def expectations(work: Path) -> dict[str, dict[str, Any]]:
    """Return what was expected of each plan that was searched, by the name of its folder."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((work / EXPECTED).glob("*.json"))}


def contests(work: Path, folder: Path) -> list[dict[str, Any]]:
    """Compare ours with every rival at each budget, frozen and tuned, on the same pictures.

    Ours is the one point that was made for the budget, and where two were tuned (for the picture as it is, and for a
    smaller one) the one that was better on the training pictures that judged. A rival counts by its best point at or
    below the budget on the very pictures that compare, which flatters it."""
    document, tuned = json.loads((folder / "pareto.json").read_text()), tunings(work)
    values: dict[tuple[str, str], dict[str, float]] = {}
    for row in map(json.loads, (folder / "rows.jsonl").read_text().splitlines()):
        values.setdefault((row["method"], row["point"]), {})[row["image"]] = row["value"]
    found = []
    for budget in document["budgets"]:
        for is_tuned in (False, True):
            entries = [point for point in document["points"] if point["tuned"] == is_tuned]
            made = [e for e in entries if e["method"] in (OURS, OWN_SIZE) and budget_of(e["point"]) == budget]
            own = min(made, key=lambda e: tuned[e["point"]]["after"] if is_tuned else e["method"] != OURS, default=None)
            if own is None:
                continue
            line = {"budget": budget, "tuned": is_tuned, **shown(own), "against": []}
            for method in dict.fromkeys(e["method"] for e in entries if not e["ours"]):
                within = [e for e in entries if e["method"] == method and e["operations"] <= budget]
                rival = min(within, key=lambda e: e["mean"], default=None)
                if rival is not None:
                    mine, its = (values[e["method"], e["point"]] for e in (own, rival))
                    both = [image for image in mine if mine[image] is not None and its[image] is not None]
                    pair = (np.array([side[image] for image in both]) for side in (mine, its))
                    compared = compare_paired(*pair, generator=np.random.default_rng(0))
                    more = compared.difference
                    test = {"difference": more.mean, "interval of it": [more.low, more.high], "p": compared.p_value}
                    line["against"].append({**shown(rival), **test})
            found.append(line)
    return found


def shown(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("method", "point", "mean", "interval", "operations")}


def budget_of(point: str) -> float:
    """Return the budget that a point was made for, from the name of its folder."""
    return float(point.removesuffix(" seed 0").rpartition(" ")[2])


def compact(document: dict[str, Any]) -> dict[str, Any]:
    """Return a comparison without folders of this machine, and its numbers with six digits."""
    kept = {key: value for key, value in document.items() if key not in ("skipped", "classes", "selection")}
    kept |= {key: Path(str(document[key])).name for key in ("model", "source")}
    return rounded(kept)


def rounded(content: Any) -> Any:
    return json.loads(json.dumps(content), parse_float=lambda text: float(f"{float(text):.6g}"))


def neighbour_rows(folder: Path) -> list[dict[str, Any]]:
    """Return accuracy and what it is more than that of the unpruned model, of all that has every image's answer."""
    groups: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.npz")):
        groups.setdefault(path.stem.partition(", fold ")[0], []).append(np.load(path))
    rows = []
    for name, parts in groups.items():
        if not np.sum([part["which"] for part in parts], axis=0).all():
            continue
        for k in map(str, NEIGHBOURS):
            own, full = np.zeros(len(parts[0]["which"]), bool), groups["unpruned"][0][k]
            for part in parts:
                own[part["which"]] = part[k]
            share = bootstrap_share(own)
            more = bootstrap_mean(own.astype(float) - full, generator=np.random.default_rng(0))
            rows.append(
                {
                    "name": name,
                    "k": int(k),
                    "accuracy": share.mean,
                    "interval": [share.low, share.high],
                    "more": more.mean,
                    "more interval": [more.low, more.high],
                    "p_value": mcnemar_p(own, full),
                }
            )
    return rows
