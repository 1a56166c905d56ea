"""How far half precision moves the output of a pruned model, beside what it does to the whole one.

    python benchmarks/pruning_precision.py --model facebook/dinov2-small --images photos/ --head heads/L06 --stage 6

Relative L2 distance (%) of class-token embeddings to those of the same model in float32, mean and standard error over
images. A pruned model may also choose other tokens: the share of removed tokens that float32 keeps is beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from measure import machine, save
from torch import Tensor

import pullback as pb
from pullback.evaluation import relative_l2
from recipes.measurement import mean_with_error

PRECISIONS = {"bf16 autocast": torch.bfloat16, "fp16 autocast": torch.float16}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default benchmarks/results)")
    options = parser.parse_args()
    probe = pb.load_probe(options.model, "cls", device=options.device)
    model = probe.backbone.model
    images = probe.load_images(options.images, 224, limit=options.limit).to(options.device)
    head = pb.ImportanceHead.from_pretrained(options.head, device=options.device)
    pruned = pb.prune(model, head, ratio=options.ratio, stages=[options.stage], dense=False)

    def outputs(dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings of the whole and the pruned model, and which tokens the second removed, as a mask [B, N]."""
        whole, fewer, gone = [], [], []
        for part in images.split(options.batch):
            with torch.autocast(images.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
                whole.append(model(part).pooler_output.float())
                output, run = pruned.with_record(part)
            fewer.append(output.pooler_output.float())
            tokens = probe.backbone.token_layout(part).tokens
            gone.append(
                torch.zeros(len(part), tokens, device=part.device).scatter(1, run.records[0].removed, 1.0).bool()
            )
        return torch.cat(whole), torch.cat(fewer), torch.cat(gone)

    exact = outputs(None)
    rows: list[dict[str, Any]] = []
    for name, dtype in PRECISIONS.items():
        found = outputs(dtype)
        others = (found[2] & ~exact[2]).sum(1) / exact[2].sum(1)
        rows.append(
            {
                "precision": name,
                "whole": mean_with_error(relative_l2(found[0], exact[0])),
                "pruned": mean_with_error(relative_l2(found[1], exact[1])),
                "other tokens removed": mean_with_error(others),
            }
        )
        print(rows[-1], flush=True)
    content = {"machine": machine(torch.device(options.device)), "model": options.model, "images": len(images)}
    content |= {"stage": options.stage, "ratio": options.ratio, "rows": rows}
    print(f"written: {save(f'pruning_precision_{options.device}', content, options.out)}")


if __name__ == "__main__":
    main()
