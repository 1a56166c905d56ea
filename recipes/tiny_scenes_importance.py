"""What the importance maps of `tiny-scenes`' depth look at: depth edges, objects, or merely a place in the image?

    python -m recipes.tiny_scenes_importance --scenes 64 --out importance.json

imp* of the depth decoder at some layers, for held-out scenes, is ranked against what is known about each patch: its
largest depth step, the share of objects, how far it is. Two nulls stand beside each Spearman correlation: the maps of
other scenes, which know where things usually are but not where they are here, and maps with permuted tokens.
Sensitivity is that of depth in metres, where the far counts most, and of its logarithm, on which the network was
trained; both come from one Jacobian. "All directions" are the norms of a token's block of it, without truncation.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.geometry.spectrum import as_token_maps
from pullback.operators import DenseOperator, JacobianOperator, LowRankMetric
from pullback.probes import ProbeMap, load_probe
from pullback.randnla import exact_svd
from pullback.runs.progress import Lines
from pullback.scenes.render import SceneBatch, normalised, render
from pullback.scenes.splits import HELD_OUT
from recipes.measurement import mean_with_error, rounded, weights_sha256, write_result

FIRST_SEED = 3 * HELD_OUT  # beside the bank and the queries of the evaluation
METRES, LOG = "metres", "log metres"
LEADING, ALL = "rank 20", "all directions"
EVERY, WITHOUT_SKY = "all patches", "patches without sky"
_RANK = 20
_BATCH = 2
_PERMUTATIONS = 9999


# What is known about a patch


def patch_facts(scenes: SceneBatch, patch: int) -> dict[str, Tensor]:
    """[B, N] each, for the first views.

    "depth step": the largest |difference of log depth| of neighbouring pixels; pairs with sky do not count.
    "objects": the share of its pixels that show one. "distance": its mean log depth, sky beyond everything.
    """
    sky = _patches(scenes.sky[:, 0], patch)
    logs = _patches(torch.where(scenes.sky[:, 0], torch.nan, scenes.depth[:, 0]).log(), patch)
    steps = [logs.diff(dim=axis).abs().nan_to_num(0.0).flatten(2).amax(2) for axis in (2, 3)]
    return {
        "depth step": torch.maximum(*steps),
        "objects": _patches(scenes.instance[:, 0] >= 10, patch).float().mean((2, 3)),
        "distance": logs.flatten(2).nanmean(2).nan_to_num(torch.inf),
        "sky": sky.float().mean((2, 3)),
    }


def _patches(image: Tensor, patch: int) -> Tensor:
    """[B, H, W] -> [B, N, patch, patch], row by row."""
    return image.unfold(1, patch, patch).unfold(2, patch, patch).flatten(1, 2)


# Importance


@dataclass(frozen=True)
class Maps:
    """Importance of the patch tokens of some scenes."""

    importance: dict[tuple[str, str], Tensor]  # (scale, directions) -> [B, N]
    captured: dict[str, Tensor]  # scale -> kappa(20) [B]


def importance_maps(probe: ProbeMap, images: Tensor, rank: int = _RANK) -> Maps:
    """Both scales from one dense Jacobian J [B, M, N*D]: that of log depth y is diag(1/y) J."""
    features = probe.features(images)
    layout = probe.token_layout(features)
    operator = JacobianOperator(probe, features)
    dense, depth = operator.dense(), operator.output.clamp_min(1e-6)
    importance, captured = {}, {}
    for scale, matrix in ((METRES, dense), (LOG, dense / depth[..., None])):
        svd = exact_svd(DenseOperator(matrix), min(rank, matrix.shape[1]))
        energies = svd.singular_values.square()
        leading = LowRankMetric(as_token_maps(svd.right, features.shape[1:]), energies).importance()
        blocks = matrix.unflatten(-1, features.shape[1:]).square().sum((1, 3)).sqrt()
        for directions, values in ((LEADING, leading), (ALL, blocks)):
            importance[scale, directions] = layout.patch_map(values).flatten(1).cpu()
        captured[scale] = (energies.sum(1) / matrix.square().sum((1, 2))).cpu()
    return Maps(importance, captured)


def _joined(parts: list[Maps]) -> Maps:
    first = parts[0]
    return Maps(
        {key: torch.cat([part.importance[key] for part in parts]) for key in first.importance},
        {key: torch.cat([part.captured[key] for part in parts]) for key in first.captured},
    )


# Rank correlations and their nulls


def compare(maps: Tensor, fact: Tensor, counted: Tensor, generator: torch.Generator) -> dict[str, Any]:
    """Spearman's rho of maps [S, N] with a fact [S, N] over the ``counted`` tokens [S, N], scene by scene.

    ``gain`` is how far a scene's own map is ahead of the maps of the others at the same tokens. p-values are
    one-sided, of the mean over scenes: against maps dealt to scenes at random, and against tokens permuted within each
    map. Scenes in which the fact is the same everywhere say nothing and are left out.
    """
    rho, permuted = _correlations(maps, fact, counted, generator)
    known = ~rho.diagonal().isnan()
    rho, permuted = rho[known][:, known], permuted[known]
    scenes = len(rho)
    own = rho.diagonal()
    others = (rho.sum(0) - own) / max(1, scenes - 1)
    deals = torch.rand(_PERMUTATIONS, scenes, generator=generator).argsort(1)
    dealt = rho[deals, torch.arange(scenes)].mean(1)
    shuffled = permuted.mean(0)
    return {
        "scenes": scenes,
        "rho": mean_with_error(own),
        "rho_of_other_scenes": rounded(others.mean()),
        "gain": mean_with_error(own - others),
        "p_other_scenes": _p_value(own.mean(), dealt),
        "permuted_tokens_95": [rounded(end) for end in shuffled.quantile(torch.tensor([0.025, 0.975]).double())],
        "p_permuted_tokens": _p_value(own.mean(), shuffled),
    }


def _correlations(maps: Tensor, fact: Tensor, counted: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """rho [S, S] of map i with the fact of scene j, and of each own map with permuted tokens [S, K]."""
    columns, permuted = [], []
    for scene in range(len(maps)):
        tokens = counted[scene]
        target = _standard_ranks(fact[scene, tokens][None])[0]
        ranked = _standard_ranks(maps[:, tokens])
        columns.append(ranked @ target)
        orders = torch.rand(_PERMUTATIONS // 10, len(target), generator=generator).argsort(1)
        permuted.append(ranked[scene][orders] @ target)
    return torch.stack(columns, 1), torch.stack(permuted)


def _standard_ranks(values: Tensor) -> Tensor:
    """Ranks of each row, ties shared, with mean 0 and length 1: their products are Spearman's rho; NaN if all tie."""
    from scipy.stats import rankdata

    ranks = torch.from_numpy(rankdata(values.numpy(), axis=1)).double()
    centred = ranks - ranks.mean(1, keepdim=True)
    return centred / centred.norm(dim=1, keepdim=True)


def _p_value(measured: Tensor, null: Tensor) -> float:
    return rounded((1 + int((null >= measured).sum())) / (1 + len(null)))


# The command


def measure(
    model: str, decoder: str, layers: list[int], scenes: int, device: torch.device, seed: int
) -> dict[str, Any]:
    """Everything that the result file holds but its origin."""
    probes = {layer: load_probe(model, decoder, layer, device=device) for layer in layers}
    some = next(iter(probes.values())).backbone
    size, patch = some.preprocessing.size, some.patch_size
    drawn = render(range(FIRST_SEED, FIRST_SEED + scenes), size=size, device=device)
    facts = {name: values.cpu() for name, values in patch_facts(drawn, patch).items()}
    sky = facts.pop("sky")
    counted = {EVERY: torch.ones_like(sky, dtype=torch.bool), WITHOUT_SKY: sky == 0}
    generator = torch.Generator().manual_seed(seed)
    rows, overview = [], []
    for layer, probe in probes.items():
        maps = _maps_of(probe, normalised(drawn.rgb[:, 0]))
        overview += list(_overview(maps, layer))
        for (scale, directions), values in maps.importance.items():
            for patches, mask in counted.items():
                for name, fact in facts.items():
                    setting = {"layer": layer, "scale": scale, "directions": directions, "patches": patches}
                    rows.append(setting | {"fact": name} | compare(values, fact, mask, generator))
    return {
        "what": "Spearman rank correlation over patch tokens of importance maps with facts about the patches",
        "model": model,
        "weights_sha256": weights_sha256(model),
        "decoder": decoder,
        "scenes": scenes,
        "first_seed": FIRST_SEED,
        "seed": seed,
        "patches_without_sky": rounded((sky == 0).float().mean()),
        "overview": overview,
        "correlations": rows,
    }


def _maps_of(probe: ProbeMap, images: Tensor) -> Maps:
    progress = Lines()
    progress.work(probe.name, len(images), "scenes")
    parts = []
    for some in images.split(_BATCH):
        parts.append(importance_maps(probe, some))
        progress.advance(len(some))
    return _joined(parts)


def _overview(maps: Maps, layer: int) -> Iterator[dict[str, Any]]:
    """Per scale: kappa(20), how alike the truncated map and that of all directions are, how much one patch carries."""
    for scale, captured in maps.captured.items():
        leading, blocks = maps.importance[scale, LEADING], maps.importance[scale, ALL]
        alike = (_standard_ranks(leading) * _standard_ranks(blocks)).sum(1)
        energy = leading.square()
        yield {
            "layer": layer,
            "scale": scale,
            "captured": mean_with_error(captured),
            "rho_of_rank_20_with_all_directions": mean_with_error(alike),
            "energy_of_the_strongest_patch": mean_with_error(energy.amax(1) / energy.sum(1)),
        }


def table(result: dict[str, Any], patches: str = WITHOUT_SKY, directions: str = LEADING) -> str:
    """As Markdown: rho of a scene's own map, in brackets that of the maps of other scenes."""
    names = list(dict.fromkeys(row["fact"] for row in result["correlations"]))
    lines = [f"| sensitivity of | layer | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    chosen = [row for row in result["correlations"] if row["patches"] == patches and row["directions"] == directions]
    for scale in (METRES, LOG):
        for layer in dict.fromkeys(row["layer"] for row in chosen):
            cells = {row["fact"]: _cell(row) for row in chosen if row["layer"] == layer and row["scale"] == scale}
            lines.append(f"| {scale} | L{layer:02d} | {' | '.join(cells[name] for name in names)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['rho']['mean']:+.2f} ± {row['rho']['se']:.2f} ({row['rho_of_other_scenes']:+.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-scenes", help="the embedded one, or a folder that training wrote")
    parser.add_argument("--decoder", default="depth-8x8")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 5, 8])
    parser.add_argument("--scenes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the permutations")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    result = measure(options.model, options.decoder, options.layers, options.scenes, device, options.seed)
    write_result(options.out, result, device)
    print(table(result))


if __name__ == "__main__":
    main()
