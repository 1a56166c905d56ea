"""Heads of several layers and sizes from one stream of crops: rho against targets and cost.

python benchmarks/layer_heads.py --model facebook/dinov2-small --train train/ --held-out heldout/ --device cuda \
    --work runs/heads

Stage 1: block norms of varied crops for all layers at once, two backward passes each. Stage 2, for the layers of
--refine: the importance of plain crops by orthogonal iteration. Held-out images are plain and their importance accurate
to 1e-5. A head is LAYER:WIDTH or LAYER:WIDTHxROUNDS. --start goes on from the heads of another run.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from heads import read_pictures
from measure import machine, random_dinov2, save
from torch import Tensor

import pullback as pb
from pullback.data.crops import CROPS, STRONG
from pullback.evaluation import spearman
from pullback.learning.fit import FitConfig, fit
from pullback.learning.head import ImportanceHead
from pullback.learning.head_group import GroupConfig, GroupTask, HeadGroup
from pullback.learning.target_streams import FreshCrops, LayerBlock, LayerStream, block_norms_of_layers
from pullback.learning.train_head import HeadExamples, head_scores, mean_map_scores, rho_summary
from pullback.learning.train_heads import HeadSize, StreamConfig, fit_heads, held_out_targets, layers_of
from pullback.learning.train_spn import origin_of
from pullback.probes import ProbeMap
from pullback.runs.progress import Lines

VARIATIONS = {"strong": STRONG, "crops": CROPS}
SEEN = 200  # training images on which heads are judged too
HEADS = ("3:128", "3:256", "3:512", "3:256x2", "3:512x2", "6:256", "6:256x2", "10:256")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-scenes")
    parser.add_argument("--decoder", default="cls")
    parser.add_argument("--heads", nargs="+", default=list(HEADS))
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=1440)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--block", type=int, default=8192, help="pictures per block")
    parser.add_argument("--steps-per-block", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--hint-weight", type=float, default=0.3)
    parser.add_argument("--dropout", type=float, default=0.0, help="of the entries of the features, in stage 1")
    parser.add_argument("--weight-decay", type=float, default=0.05, help="in stage 1")
    parser.add_argument("--validate-every", type=int, default=160)
    parser.add_argument("--variation", default="strong", choices=list(VARIATIONS))
    parser.add_argument("--judge", default="exact", help="method of the held-out targets: auto for dense decoders")
    parser.add_argument("--start", type=Path, default=None, help="folder of heads to go on from")
    parser.add_argument("--refine", nargs="*", default=["10:256"], help="heads that go on with importance")
    parser.add_argument("--refine-pictures", type=int, default=12000)
    parser.add_argument("--refine-steps", type=int, default=1500)
    parser.add_argument("--limit", type=int, default=None, help="of training pictures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, required=True, help="folder for the heads")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON file")
    parser.add_argument("--name", default="layer_heads_cuda", help="of the JSON file")
    options = parser.parse_args()

    begun = time.perf_counter()
    specs = {name: _spec(name) for name in options.heads}
    layers = layers_of(list(specs.values()))
    probes = {layer: pb.load_probe(options.model, options.decoder, layer, device=options.device) for layer in layers}
    probe = probes[layers[0]]
    pictures = read_pictures(options.train, options.limit).to(options.device)
    found = held_out_targets(
        probe, layers, probe.load_images(options.held_out, options.size), method=options.judge, progress=Lines()
    )
    held_out, norms = [judge.examples for judge in found], [judge.norms for judge in found]
    content: dict[str, Any] = {
        "machine": machine(torch.device(options.device)),
        "options": {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()},
        "held_out_images": len(held_out[0]),
        "training_images": len(pictures),
        "baselines": baselines(probe, layers, pictures, held_out, norms, options.size),
    }
    print(f"[{time.perf_counter() - begun:.0f} s] {json.dumps(content['baselines'])}", flush=True)

    config = StreamConfig(
        options.block,
        options.steps_per_block,
        256,
        VARIATIONS[options.variation],
        hint_weight=options.hint_weight,
        dropout=options.dropout,
    )
    content["targets_per_second"] = targets_per_second(probe, layers, pictures, options.size, config)
    start = None
    if options.start is not None:
        start = {head.name: ImportanceHead.from_pretrained(options.start / head.name) for head in specs.values()}
    curve: list[dict[str, float]] = []

    def watch(step: int, numbers: Any) -> None:
        if "score" in numbers:
            rho = {name: round(value, 4) for name, value in numbers.items() if name.endswith("rho")}
            targets = -(-step // options.steps_per_block) * options.block
            curve.append({"step": step, "targets": targets, **{k: v for k, v in numbers.items() if "/" in k}})
            print(f"[{time.perf_counter() - begun:.0f} s] step {step}, {targets} targets, {rho}", flush=True)

    group, _ = fit_heads(
        probe,
        pictures,
        list(specs.values()),
        held_out,
        config,
        FitConfig(
            steps=options.steps,
            batch=options.batch,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            ema=0.995,
            validate_every=options.validate_every,
            precision="bf16" if options.device == "cuda" else "float32",
            seed=options.seed,
        ),
        size=options.size,
        start=start,
        on_step=watch,
    )
    content["curve"] = curve
    content["heads"] = {}
    seen = [
        training_examples(probes[layer], pictures[:SEEN], options.size, held_out[place].prefix)
        for place, layer in enumerate(layers)
    ]
    for name, place, _, _ in group.config.heads:
        head = group.head(name)
        content["heads"][name] = report(head.eval(), held_out[place], norms[place], seen[place])
        keep(head, probes[layers[place]], options, content["heads"][name]["importance"], name, "block-norm")
    save(options.name, content, options.out)

    for name in options.refine:
        layer = specs[name].layer
        place, key = layers.index(layer), name.replace(":", "-")
        head = refined(probes[layer], group.head(key), pictures, held_out[place], options, content, key)
        content["heads"][f"{key} refined"] = report(head, held_out[place], norms[place], seen[place])
        keep(head, probes[layer], options, content["heads"][f"{key} refined"]["importance"], key, "importance")
    content["cost"] = {size: costs(size, options.device) for size in ("small", "base") if options.device == "cuda"}
    print(json.dumps({name: content[name] for name in ("heads", "cost", "targets_per_second")}, indent=1))
    print(f"written: {save(options.name, content, options.out)}")


def baselines(
    probe: ProbeMap,
    layers: tuple[int, ...],
    pictures: Tensor,
    held_out: list[HeadExamples],
    norms: list[Tensor],
    size: int,
) -> dict[str, Any]:
    """The mean block-norm map of the plain training pictures, and the held-out block norms themselves, against imp*."""
    plain = plain_crops(probe, pictures, size)
    generator = torch.Generator(plain.device).manual_seed(0)
    maps = [
        block_norms_of_layers(probe, part, layers, num_probes=4, generator=generator)[1] for part in plain.split(200)
    ]
    joined = torch.cat(maps, 1)
    out = {}
    for place, layer in enumerate(layers):
        known = HeadExamples.kept(joined[place][:, :, None], joined[place], held_out[place].prefix)
        out[f"L{layer:02d}"] = {
            "mean map": mean_map_scores(
                known, replace(held_out[place], target=held_out[place].target.to(plain.device))
            ),
            "block norms themselves": _compare(norms[place], held_out[place].target, held_out[place].prefix),
        }
    return out


def plain_crops(probe: ProbeMap, pictures: Tensor, size: int) -> Tensor:
    """The middle of pictures [n, 3, 256, 256] uint8, as the backbone wants them: [n, 3, size, size]."""
    edge = (pictures.shape[-1] - size) // 2
    plain = pictures[:, :, edge : edge + size, edge : edge + size].float() / 255
    wanted = probe.backbone.preprocessing
    mean, std = (torch.tensor(v, device=plain.device).view(3, 1, 1) for v in (wanted.mean, wanted.std))
    return (plain - mean) / std


def training_examples(probe: ProbeMap, pictures: Tensor, size: int, prefix: int, probes: int = 32) -> HeadExamples:
    """Plain training pictures with block norms to a few per cent: what a head does better there than on held-out
    images is what more pictures could bring."""
    generator = torch.Generator(pictures.device).manual_seed(1)
    crops = plain_crops(probe, pictures, size)
    parts = [
        block_norms_of_layers(probe, part, (probe.layer,), num_probes=probes, generator=generator)
        for part in crops.split(50)
    ]
    features, norms = (torch.cat([part[k][0] for part in parts]) for k in (0, 1))
    return HeadExamples.kept(features, norms, prefix)


def report(head: ImportanceHead, held_out: HeadExamples, norms: Tensor, seen: HeadExamples) -> dict[str, Any]:
    """rho against imp* and against block norms, and against block norms of images that it was trained on."""
    return {
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "importance": head_scores(head, held_out),
        "block norms": head_scores(head, replace(held_out, target=norms)),
        "block norms of training images": head_scores(head, seen),
    }


def refined(
    probe: ProbeMap,
    start: ImportanceHead,
    pictures: Tensor,
    held_out: HeadExamples,
    options: argparse.Namespace,
    content: dict[str, Any],
    name: str,
) -> ImportanceHead:
    """The head after more steps on the importance of plain crops."""
    crops = FreshCrops(
        probe,
        pictures,
        options.size,
        options.refine_pictures,
        CROPS,
        num_probes=None,
        rounds=3,
        precision="tf32",
        seed=options.seed + 1,
    )
    begun = time.perf_counter()
    examples = crops(0)
    _wait(options.device)
    rate = options.refine_pictures / (time.perf_counter() - begun)
    features = examples.features(torch.arange(len(examples))).half()[None]
    hints = features.new_zeros(len(examples), features.shape[2], 1)
    block = LayerBlock(features, examples.target[None], hints)
    config = start.config
    group = HeadGroup(GroupConfig(config.dim, 1, ((name, 0, config.width, config.rounds),))).to(options.device)
    group.head(name).load_state_dict(start.state_dict())
    task = GroupTask(lambda number: block, [held_out], group, options.refine_steps, 0.0)
    fitted = fit(
        group,
        task,
        FitConfig(
            steps=options.refine_steps,
            batch=256,
            learning_rate=1e-3,
            ema=0.995,
            validate_every=max(1, options.refine_steps // 6),
            precision="bf16" if options.device == "cuda" else "float32",
            seed=options.seed,
        ),
        on_step=lambda step, numbers: print(name, step, numbers[f"{name}/rho"]) if "score" in numbers else None,
    )
    content.setdefault("refined", {})[name] = {"targets_per_second": rate, "best_step": fitted.step}
    return group.head(name).eval()


def keep(
    head: ImportanceHead, probe: ProbeMap, options: argparse.Namespace, scores: dict, name: str, target: str
) -> None:
    known = {key: value for key, value in scores.items() if key != "score"}
    origin = origin_of(probe, 20, (options.size, options.size))
    head.describe(origin=origin, scores=known, target=target).save_pretrained(options.work / name)


@torch.no_grad()
def costs(size: str, device: str, batch: int = 64) -> dict[str, Any]:
    """Milliseconds of a DINOv2 forward and of heads, in bf16 at 224 px, as CUDA graphs: the way one deploys."""
    backbone = pb.load_probe(random_dinov2(size).to(device, torch.bfloat16), "cls", 10).backbone
    images = torch.randn(batch, 3, 224, 224, device=device, dtype=torch.bfloat16)
    features = torch.randn(batch, 257, backbone.dim, device=device, dtype=torch.bfloat16)
    whole = _graph_milliseconds(lambda: backbone.features(images, [backbone.depth - 1]))
    out: dict[str, Any] = {"batch": batch, "backbone_ms": whole}
    for width, rounds in ((64, 1), (128, 1), (256, 1), (512, 1), (256, 2), (512, 2)):
        head = ImportanceHead(backbone.dim, width, rounds=rounds).to(device, torch.bfloat16).eval()
        own = _graph_milliseconds(lambda head=head: head.logits(features))
        out[f"{width}x{rounds}"] = {"ms": own, "share": own / whole}
    return out


def _graph_milliseconds(work: Any, rounds: int = 20) -> float:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(rounds):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / rounds


def targets_per_second(
    probe: ProbeMap, layers: tuple[int, ...], pictures: Tensor, size: int, config: StreamConfig
) -> float:
    """How many pictures a stream has the block norms of, of all layers, in a second."""
    stream = LayerStream(probe, layers, pictures, size, config.block, config.variation)
    stream(0)  # warms up
    started = time.perf_counter()
    stream(0)
    _wait(probe.device.type)
    return config.block / (time.perf_counter() - started)


def _spec(name: str) -> HeadSize:
    layer, _, shape = name.partition(":")
    width, _, rounds = shape.partition("x")
    return HeadSize(name.replace(":", "-"), int(layer), int(width), int(rounds or 1))


def _compare(scores: Tensor, target: Tensor, prefix: int) -> dict[str, float]:
    target = target.to(scores.device)
    return rho_summary(spearman(scores, target), spearman(scores[:, prefix:], target[:, prefix:]))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
