"""The ablations of the importance head (appendix E of the paper) as listed settings, one row of results per run.

    python -m pullback.experiments.head_ablations --train STORE --held-out STORE --name E.2 --out rows.jsonl

The stores come from `pullback targets`: E.1 belongs on a dense decoder at L4, the others on DINOv2 CLS L10.
What is in the file already is not run again, so the same command goes on after a stop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from pullback.errors import PullbackError
from pullback.experiments.command import Device, Row, RowFile, explained
from pullback.learning.fit import FitConfig, fit
from pullback.learning.train_head import (
    HeadTask,
    StoredRows,
    check_stores,
    fingerprint,
    head_scores,
    mean_map_scores,
    new_head,
)
from pullback.probes import ProbeMap
from pullback.report.wording import plain
from pullback.runs.progress import Lines, Progress
from pullback.runs.provenance import provenance
from pullback.targets.store import TargetStore

IDENTITY = ("ablation", "variant", "seed", "steps", "batch", "learning_rate", "train", "held_out")
"""Rows that agree in these are of the same run."""


@dataclass(frozen=True)
class HeadVariant:
    """A head and how it is trained. ``paper_rho``: Spearman's rho where the paper states one."""

    name: str
    target: str = "importance"
    rank_weight: float = 0.5
    width: int = 256
    heads: int = 4
    images: int = 2000
    seeds: tuple[int, ...] = (0, 1, 2)
    paper_rho: float | None = None


ABLATIONS: dict[str, tuple[HeadVariant, ...]] = {
    "E.1": (
        HeadVariant("importance", paper_rho=0.20),
        HeadVariant("block-norm", target="block-norm", paper_rho=0.09),
    ),
    "E.2": (
        HeadVariant("w_rank 0", rank_weight=0.0),
        HeadVariant("w_rank 0.5"),
        HeadVariant("w_rank 1", rank_weight=1.0),
    ),
    "E.3": (
        HeadVariant("width 128", width=128),
        HeadVariant("width 256, 4 heads"),
        HeadVariant("width 512", width=512),
        HeadVariant("2 heads", heads=2),
        HeadVariant("8 heads", heads=8),
    ),
    "E.4": (
        HeadVariant("250 images", images=250),
        HeadVariant("500 images", images=500),
        HeadVariant("1000 images", images=1000),
        HeadVariant("2000 images"),
    ),
}

PAPER: dict[str, str] = {
    "E.1": "DPT depth at layer 4: rho about 0.20 for the sigma^2-weighted target, about 0.09 for block norms.",
    "E.2": "DINOv2 CLS L10, 2,000 images: pruning degradation is nearly the same for the three weights. No rho stated.",
    "E.3": (
        "DINOv2 CLS L10, 2,000 images: pruning degradation does not fall beyond width 256, and two heads are slightly "
        "better than four. No rho stated."
    ),
    "E.4": (
        "500 to 4,000 images: pruning degradation saturates by 2,000 on DINOv2 CLS L10, and has no trend on DPT L4. "
        "No rho stated. Here 250 to 2,000."
    ),
}
"""What the paper found. It reports E.2 to E.4 as degradation under pruning, without a rho to compare with."""


def run_ablation(
    name: str,
    probe: ProbeMap,
    train: TargetStore,
    held_out: TargetStore,
    *,
    steps: int = 3000,
    seeds: Sequence[int] | None = None,
    batch: int = 64,
    learning_rate: float = 2e-3,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Run every variant of an ablation with every seed, on features computed once; return the rows, old and new.

    ``out``: a file of JSON lines that rows are read from and added to, each as soon as its run is finished.
    """
    variants_of(name)
    check_stores(probe, [train, held_out])
    progress = progress or Progress()
    config = FitConfig(
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        warmup=min(100, steps // 10),
        validate_every=max(1, steps // 12),
    )
    shared = {
        "train": fingerprint(train.read(modes=False), train.config),
        "held_out": fingerprint(held_out.read(modes=False), held_out.config),
        "model": Path(train.config["model"]).name,  # without the folders of this machine; the hash says which weights
        **{key: train.config[key] for key in ("weights", "decoder", "layer", "rank", "size", "crops")},
        "pullback": train.config["pullback"],
        "provenance": provenance(probe.device),
    }
    known = RowFile(None if out is None else Path(out), IDENTITY)
    rows: list[Row] = []
    sets: list[StoredRows] = []
    for variant, begun in planned(name, config, seeds):
        begun |= shared
        row = known.find(begun)
        if row is None:
            if not sets:  # a file that holds every row needs no features
                sets = [StoredRows.of(probe, store) for store in (train, held_out)]
            measured = run_variant(variant, sets[0], sets[1], replace(config, seed=begun["seed"]))
            row = known.add({**begun, **measured})
            progress.finished(f"{variant.name}, seed {row['seed']}", _line(row))
        rows.append(row)
    return rows


def planned(name: str, config: FitConfig, seeds: Sequence[int] | None = None) -> list[tuple[HeadVariant, Row]]:
    """List every run with what is known of its row before it. ``seeds`` in place of the variants' own."""
    settings = {key: getattr(config, key) for key in ("steps", "batch", "learning_rate")}
    return [
        (variant, {"ablation": name, "variant": variant.name, "seed": seed, **settings})
        for variant in variants_of(name)
        for seed in (variant.seeds if seeds is None else seeds)
    ]


def run_variant(variant: HeadVariant, train: StoredRows, held_out: StoredRows, config: FitConfig) -> Row:
    """Train one head. ``rho`` is against what the head was trained for, ``rho_importance`` against imp* in any case."""
    rows = first_images(train, variant.images)
    examples, judge = rows.examples(variant.target), held_out.examples(variant.target)
    head = new_head(examples, variant.width, variant.heads, target=variant.target, seed=config.seed)
    begun = time.perf_counter()
    fitted = fit(head, HeadTask([examples], judge, variant.rank_weight), config)
    seconds = time.perf_counter() - begun
    same_grid = examples.target.shape[1] == judge.target.shape[1]
    return {
        **{key: getattr(variant, key) for key in ("target", "rank_weight", "width", "heads")},
        "images": len(set(rows.table.image_sha256)),
        "images_asked": variant.images,
        "rows": len(rows),
        **{key: fitted.scores[key] for key in ("rho", "rho_se", "rho_patches")},
        "rho_importance": head_scores(head.eval(), held_out.examples())["rho"],
        "rho_of_the_mean_map": mean_map_scores(examples, judge)["rho"] if same_grid else None,
        "best_step": fitted.step,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "seconds": round(seconds, 3),
        "paper_rho": variant.paper_rho,
    }


def first_images(rows: StoredRows, count: int) -> StoredRows:
    """All rows of the first ``count`` images, or everything where there are no more."""
    images = dict.fromkeys(rows.table.image_sha256)
    if len(images) <= count:
        return rows
    chosen = set(list(images)[:count])
    return rows.select([row for row, image in enumerate(rows.table.image_sha256) if image in chosen])


def variants_of(name: str) -> tuple[HeadVariant, ...]:
    if name not in ABLATIONS:
        raise PullbackError(f"name: expected one of {', '.join(ABLATIONS)}, got {name!r}.")
    return ABLATIONS[name]


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line per run, the paper's rho where it states one."""
    lines = ["| variant | seed | ρ | ρ, patches | ρ, mean map | paper |", "|---|---|---|---|---|---|"]
    for row in rows:
        known = (row["rho_patches"], row["rho_of_the_mean_map"], row["paper_rho"])
        cells = [f"{row['rho']:.4f} ± {row['rho_se']:.4f}", *(plain(value, 4) for value in known)]
        lines.append(f"| {row['variant']} | {row['seed']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _line(row: Row) -> str:
    stated = "" if row["paper_rho"] is None else f" (paper {row['paper_rho']:.2f})"
    measured = f"rho {row['rho']:.4f} ± {row['rho_se']:.4f}{stated}, patches {row['rho_patches']:.4f}"
    return f"{row['ablation']} {row['variant']}, seed {row['seed']}: {measured}, {row['seconds']:.0f} s"


def main(
    train: Annotated[Path, typer.Option(help="The store to train on.")],
    held_out: Annotated[Path, typer.Option(help="The store to judge by.")],
    name: Annotated[str, typer.Option(help=f"One of {', '.join(ABLATIONS)}.")],
    out: Annotated[Path, typer.Option(help="File of JSON lines; runs that it holds are not run again.")],
    model: Annotated[str | None, typer.Option(help="The backbone.", show_default="as the store says")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = 3000,
    batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 64,
    seed: Annotated[list[int] | None, typer.Option(help="Several times for several.", show_default="0, 1, 2")] = None,
    device: Device = "auto",
) -> None:
    """An ablation of the importance head, row by row."""
    with explained():
        variants_of(name)
        stores = [TargetStore.open(folder) for folder in (train, held_out)]
        probe = stores[0].load_probe(model, device=device)
        typer.echo(f"paper: {PAPER[name]}", err=True)
        rows = run_ablation(
            name, probe, *stores, steps=steps, seeds=seed or None, batch=batch, out=out, progress=Lines()
        )
        typer.echo(table(rows))


if __name__ == "__main__":
    typer.run(main)
