"""A head from fresh crops: rho against the number of targets, and what the head costs beside the backbone.

python benchmarks/heads.py --model facebook/dinov2-small --layer 3 --train train/ --held-out heldout/ --device cuda \
    --cheap-steps 20000 --exact-steps 4000 --width 512 --work runs/head-L3

Stage 1 learns block norms of varied crops from a few VJPs each, stage 2 the exact importance of plain crops. Held-out
images are plain, their targets exact. Both stages resume from --work.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from measure import machine, save
from PIL import Image

import pullback as pb
from pullback.data.crops import CROPS, STRONG
from pullback.data.images import EXTENSIONS
from pullback.evaluation import spearman
from pullback.learning.fit import FitConfig, fit
from pullback.learning.head import HeadConfig, ImportanceHead
from pullback.learning.target_streams import FreshCrops, FreshHeadTask
from pullback.learning.train_head import HeadExamples, head_scores, rho_summary
from pullback.probes import ProbeMap
from pullback.targets.recipe import targets_of

SIDE = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-scenes")
    parser.add_argument("--decoder", default="cls")
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--cheap-steps", type=int, default=0)
    parser.add_argument("--exact-steps", type=int, default=2000)
    parser.add_argument("--block", type=int, default=4096, help="pictures per block")
    parser.add_argument("--steps-per-block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--precision", default="bf16", help="of the products")
    parser.add_argument("--validate-every", type=int, default=500)
    parser.add_argument("--limit", type=int, default=None, help="of training pictures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=None, help="folder to go on from")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON file")
    options = parser.parse_args()

    probe = pb.load_probe(options.model, options.decoder, options.layer, device=options.device)
    pictures = read_pictures(options.train, options.limit)
    held_out, block_norm = judges(probe, options.held_out, options.size)
    crops = FreshCrops(
        probe,
        pictures.to(options.device),
        options.size,
        options.block,
        precision=options.precision,
        seed=options.seed,
    )
    torch.manual_seed(options.seed)
    head = ImportanceHead.from_config(HeadConfig(probe.backbone.dim, options.width)).to(options.device)
    stages = [
        ("block norms", options.cheap_steps, {"variation": STRONG, "num_probes": 4}),
        ("importance", options.exact_steps, {"variation": CROPS, "num_probes": None}),
    ]
    content = {"machine": machine(torch.device(options.device)), "options": _plain(vars(options)), "stages": []}
    first = True
    for name, steps, changes in stages:
        if not steps:
            continue
        blocks = FreshCrops(**{**vars(crops), **changes})
        begun = time.perf_counter()
        example = blocks(0)
        seconds = time.perf_counter() - begun
        if first:
            rows = torch.arange(min(256, len(example)))
            head.start_from(example.features(rows), example.target[rows])
            first = False
        curve: list[dict[str, float]] = []

        def watch(step: int, numbers: dict[str, float], name: str = name, curve: list = curve) -> None:
            if "rho" in numbers:
                targets = -(-step // options.steps_per_block) * options.block
                curve.append(
                    {"step": step, "targets": targets, "rho": numbers["rho"], "patches": numbers["rho_patches"]}
                )
                print(f"{name}: step {step}, {targets:.0f} targets, rho {numbers['rho']:.4f}", flush=True)

        config = FitConfig(
            steps=steps,
            batch=options.batch,
            learning_rate=options.learning_rate if name == "block norms" or not options.cheap_steps else 5e-4,
            validate_every=options.validate_every,
            precision="bf16" if options.device == "cuda" else "float32",
            seed=options.seed,
        )
        task = FreshHeadTask(blocks, held_out, options.steps_per_block)
        out = None if options.work is None else options.work / name.replace(" ", "-")
        fit(head, task, config, out=out, on_step=watch)
        content["stages"].append({"stage": name, "targets_per_second": options.block / seconds, "curve": curve})
    with torch.no_grad():
        content["held_out"] = head_scores(head, held_out)
        content["baselines"] = {"block norms themselves": rho_summary(*_rho(block_norm, held_out))}
        content["parameters"] = sum(p.numel() for p in head.parameters())
        content["cost"] = cost(probe, head, options.size, options.device)
    print(json.dumps({name: content[name] for name in ("held_out", "baselines", "parameters", "cost")}, indent=1))
    if options.work is not None:
        head.save_pretrained(options.work / "model")
    print(f"written: {save(f'heads_L{options.layer:02d}_{options.device}', content, options.out)}")


def read_pictures(folder: Path, limit: int | None) -> torch.Tensor:
    """[n, 3, 256, 256] uint8: the short side scaled to 256, the middle."""
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS)[:limit]
    pictures = []
    for path in paths:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
        scale = SIDE / min(rgb.size)
        if scale != 1:
            rgb = rgb.resize((max(SIDE, round(rgb.width * scale)), max(SIDE, round(rgb.height * scale))), Image.BICUBIC)
        left, top = (rgb.width - SIDE) // 2, (rgb.height - SIDE) // 2
        pictures.append(torch.from_numpy(np.array(rgb.crop((left, top, left + SIDE, top + SIDE)))).permute(2, 0, 1))
    return torch.stack(pictures)


def judges(
    probe: ProbeMap, folder: Path, size: int, method: str = "auto", precision: str = "float32"
) -> tuple[HeadExamples, torch.Tensor]:
    """Held-out images with their exact importance, and their block norms."""
    images = probe.load_images(folder, size)
    with torch.no_grad():
        features = [probe.features(part) for part in images.split(32)]
    parts = [targets_of(probe, part, 20, method, precision=precision) for part in features]
    importance = torch.cat([part.importance for part in parts]).float()
    norms = torch.cat([part.block_energy.value.clamp_min(0).sqrt() for part in parts]).float()
    prefix = probe.backbone.token_layout(images[:1]).prefix
    plain = torch.cat([part.as_subclass(torch.Tensor) for part in features])
    return HeadExamples.kept(plain, importance, prefix), norms


def cost(probe: ProbeMap, head: ImportanceHead, size: int, device: str, batch: int = 64) -> dict[str, float]:
    """Milliseconds of the head and of a backbone forward at this batch, in the head's best arithmetic."""
    images = torch.randn(batch, 3, size, size, device=device)
    features = probe.features(images).as_subclass(torch.Tensor)
    last = probe.backbone.depth - 1

    def seconds(work: object, rounds: int = 10 if device == "cuda" else 2) -> float:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            for _ in range(rounds):
                work()  # type: ignore[operator]
            _wait(device)
            begun = time.perf_counter()
            for _ in range(rounds):
                work()  # type: ignore[operator]
            _wait(device)
        return (time.perf_counter() - begun) / rounds

    own, whole = seconds(lambda: head(features)), seconds(lambda: probe.backbone.features(images, [last]))
    return {"batch": batch, "head_ms": 1e3 * own, "backbone_ms": 1e3 * whole, "share": own / whole}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _rho(scores: torch.Tensor, examples: HeadExamples) -> tuple[torch.Tensor, torch.Tensor]:
    target, prefix = examples.target.to(scores.device), examples.prefix
    return spearman(scores, target), spearman(scores[:, prefix:], target[:, prefix:])


def _plain(values: dict) -> dict:
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


if __name__ == "__main__":
    main()
