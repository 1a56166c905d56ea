"""The Spectral Pullback Network under each supervision, beside a random network and the best constant subspace.

python benchmarks/spn.py --model facebook/dinov2-small --layer 10 --train train/ --held-out heldout/ --device cuda

V_1 on held-out images over all tokens and without the class token, with the paired lead over the constant subspace
and its 95 % interval; the share of |J|_F^2 in the predicted subspace (natural ratio) against kappa_cap.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from measure import machine, save

import pullback as pb
from pullback.learning.fit import FitConfig
from pullback.learning.spn import SpectralPullbackNetwork
from pullback.learning.train_spn import (
    comparison_row,
    constant_network,
    constant_subspace,
    example_scores,
    held_out_modes,
    natural_sensitivity_ratio,
    train_spn,
)
from pullback.targets.compute import compute_table

RUNS = {
    "RandNLA q=1": {"supervision": "randnla", "power_iters": 1},
    "RandNLA q=2": {"supervision": "randnla", "power_iters": 2},
    "Spectral": {"supervision": "spectral"},
    "distances": {"supervision": "distances"},
    "directions": {"supervision": "directions"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-scenes")
    parser.add_argument("--decoder", default="cls")
    parser.add_argument("--layer", type=int, default=10)
    parser.add_argument("--train", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--limit", type=int, default=None, help="of training images")
    parser.add_argument(
        "--constant-images", type=int, default=500, help="whose modes the constant subspace is fitted to"
    )
    parser.add_argument("--start", default="random", choices=["random", "constant"], help="where networks start")
    parser.add_argument("--runs", nargs="+", default=["RandNLA q=1", "RandNLA q=2", "Spectral"], choices=list(RUNS))
    parser.add_argument("--precision", default="tf32", help="of the products")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=None, help="folder to go on from")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON file")
    options = parser.parse_args()

    probe = pb.load_probe(options.model, options.decoder, options.layer, device=options.device)
    examples = held_out_modes(probe, options.held_out, options.rank, size=options.size)
    count = options.constant_images if options.limit is None else min(options.constant_images, options.limit)
    known, _ = compute_table(probe, options.train, rank=options.rank, size=options.size, limit=count, keep_modes=True)
    assert known.modes is not None
    subspace = constant_subspace(known.modes.to(options.device), options.rank)
    constant = example_scores(constant_network(subspace), examples)
    torch.manual_seed(options.seed)
    untrained = SpectralPullbackNetwork(examples.modes.shape[-1], options.rank, options.width).to(options.device).eval()
    rows = [
        comparison_row("best constant subspace", constant, constant),
        comparison_row("random init", example_scores(untrained, examples), constant),
    ]
    kappa = examples.singular_values.double().square().sum(1) / examples.total.double()
    content = {
        "machine": machine(torch.device(options.device)),
        "options": {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()},
        "held_out_images": len(examples),
        "kappa": float(kappa.mean()),
        "rows": rows,
    }
    start = "_from_constant" if options.start == "constant" else ""
    file = f"spn_{Path(options.model).name}_{options.decoder}_L{options.layer:02d}{start}_{options.device}"
    print(json.dumps(rows), flush=True)
    for name in options.runs:
        begun = time.perf_counter()
        config = FitConfig(
            steps=options.steps,
            batch=options.batch,
            learning_rate=options.learning_rate,
            validate_every=max(1, options.steps // 4),
            precision="bf16" if options.device == "cuda" else "float32",
            seed=options.seed,
        )
        network = train_spn(
            probe,
            options.train,
            options.held_out,
            rank=options.rank,
            width=options.width,
            precision=options.precision,
            size=options.size,
            limit=options.limit,
            constant_images=count if options.start == "constant" else 0,
            config=config,
            out=None if options.work is None else options.work / name.replace(" ", "-"),
            **RUNS[name],
        )
        found = comparison_row(name, example_scores(network, examples), constant)
        natural = natural_sensitivity_ratio(network, probe, examples)
        rows.append({**found, "natural_ratio": float(natural.mean()), "seconds": time.perf_counter() - begun})
        print(json.dumps(rows[-1]), flush=True)
        save(file, content, options.out)
    print(f"written: {save(file, content, options.out)}")


if __name__ == "__main__":
    main()
