"""The recipe of `dinov2-small-depth`: a DPT head that reads depth in metres from a frozen DINOv2-S.

    python -m recipes.dinov2_depth --model DINOV2 --rgbd RGBD --device cuda --out runs/dinov2-depth
    python -m recipes.dinov2_depth --model DINOV2 --scenes-only --device cuda --out runs/dinov2-depth-scenes

A step sees drawn scenes, block by block (see `scene_run`), and photographs with measured depth (`rgbd`), of which there
are few: a scene is drawn, then a pair of it, then a crop of any size and place, turned, mirrored and in another light.
``--scenes-only`` leaves the photographs out. DINOv2 stays as it is, and so do its features.

A picture does not tell the focal length, and a crop of half the side looks like a camera of twice the focal length at
half the distance. Depths are therefore learnt as a camera of one focal length would have seen them: true depth times
`FOCAL` over the focal length of the picture, in units of its side. `FOCAL` is that of a Kinect behind the crop with
which this package reads photographs (the middle 7/8 of the shorter side), so of those depth is in metres.

Losses: |error of log depth|, the same without each picture's mean error (its shape), and the differences of
neighbouring errors. Sky and pixels without a measurement do not count; pixels of in-filled depth maps count half.

A run that was stopped goes on exactly where its last checkpoint was written: call the same command again. The averaged
weights end up in `model/`, as float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.backbones import Backbone, load_backbone
from pullback.backbones.shipped import fingerprint
from pullback.decoders.dense import DPT_DEPTH
from pullback.errors import PullbackError
from pullback.models.dpt import DPTDepth, DPTDepthConfig
from pullback.runs.files import write_network
from pullback.runs.provenance import weights_hash
from pullback.scenes.render import SceneBatch, normalised, render
from recipes.rgbd import Pairs, read_pairs
from recipes.scene_run import (
    SceneRecipe,
    SceneRun,
    chosen,
    chosen_device,
    draw_weights,
    relit,
    signed,
    training_parser,
)
from recipes.tiny_scenes import differences

KINECT = 1.08  # focal length over the shorter side of the whole picture: 517/480 of TUM's fr1, 519/480 of NYUv2
SHOWN = 224 / 256  # of the shorter side, where the package reads a photograph
FOCAL = KINECT / SHOWN


@dataclass(frozen=True)
class Recipe(SceneRecipe):
    """How the shipped head was trained. ``backbone`` and ``pairs``: hashes of the frozen weights and of the data."""

    steps: int = 1_500
    batch: int = 40  # scenes a step
    photographs: int = 24  # pairs a step, beside the scenes
    block: int = 2_560  # scenes drawn at a time
    passes: int = 2  # over each block
    size: int = 224
    seed: int = 0
    learning_rate: float = 1e-3
    warmup: int = 200
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float = 0.999
    shape_weight: float = 0.5
    edge_weight: float = 0.5
    infilled_weight: float = 0.5  # of a pixel of an in-filled depth map
    crop: tuple[float, float] = (0.55, 1.0)  # side, as a share of the photograph's shorter one
    roll_degrees: float = 5.0
    light: float = 1.5  # how much stronger photographs are relit than scenes
    dim: int = 384
    channels: int = 96
    patch_size: int = 14
    hooks: tuple[int, ...] = (2, 5, 8, 11)
    backbone: str = ""
    pairs: str = ""

    def model(self) -> DPTDepthConfig:
        return DPTDepthConfig(self.dim, self.channels, self.patch_size, self.hooks)


class Trainee(nn.Module):
    """The head while it learns: it reads features of mean 0 and spread 1, which a DINOv2 does not give.

    A few of its channels are tens of times larger than the others, and one learning rate does not suit both.
    """

    mean: Tensor  # [4, D], of each layer's patches
    spread: Tensor  # [4, D]

    def __init__(self, config: DPTDepthConfig) -> None:
        super().__init__()
        self.head = DPTDepth(config)
        self.register_buffer("mean", torch.zeros(len(config.hooks), config.dim))
        self.register_buffer("spread", torch.ones(len(config.hooks), config.dim))

    def forward(self, taps: Sequence[Tensor], rows: int, columns: int) -> Tensor:
        standard = [(tap - mean) / spread for tap, mean, spread in zip(taps, self.mean, self.spread, strict=True)]
        return self.head(standard, rows, columns)

    def start_from(self, taps: Sequence[Tensor], patches: int) -> None:
        """Take mean and spread from the features of some pictures, whose last tokens are the patches."""
        for index, tap in enumerate(taps):
            values = tap[:, -patches:].flatten(0, 1).float()
            self.mean[index], self.spread[index] = values.mean(0), values.std(0).clamp_min(1e-3)

    @torch.no_grad()
    def finished(self) -> DPTDepth:
        """Return the head that reads the features as they are: W (x - m) / s + b = (W / s) x + (b - (W / s) m)."""
        head = deepcopy(self.head)
        for project, mean, spread in zip(head.neck.project, self.mean, self.spread, strict=True):
            assert isinstance(project, nn.Conv2d) and project.bias is not None
            project.weight /= spread[:, None, None]
            project.bias -= project.weight[:, :, 0, 0] @ mean
        return head.eval()


def build(recipe: Recipe) -> Trainee:
    """The head with its initial weights, the same for the same seed on every device."""
    trainee = Trainee(recipe.model())
    draw_weights(trainee, recipe.seed)
    last = trainee.head.head.second
    with torch.no_grad():
        last.weight.mul_(0.1)  # a nearly even map
        if last.bias is not None:
            last.bias.fill_(1.0)  # log depth of about 2.7 m
    return trainee


@dataclass(frozen=True)
class Examples:
    """What a step learns from."""

    rgb: Tensor  # [B, 3, H, W] in [0, 1]
    depth: Tensor  # [B, H, W], metres at the focal length `FOCAL`
    weight: Tensor  # [B, H, W], of each pixel; 0 where depth is not known

    @classmethod
    def of_scenes(cls, scenes: SceneBatch) -> Examples:
        """The first views. Their axis goes through the middle of the square picture."""
        focal = scenes.intrinsics[:, 0, 0, 0] / scenes.rgb.shape[-1]
        depth = scenes.depth[:, 0] * (FOCAL / focal)[:, None, None]
        return cls(scenes.rgb[:, 0], depth, (~scenes.sky[:, 0]).float())

    def varied(self, rows: Tensor, generator: torch.Generator) -> Examples:
        """The examples ``rows``, half of them mirrored, all in another light."""
        mirrored = (torch.rand(len(rows), generator=generator) < 0.5).to(rows.device)
        rgb = relit(self.rgb[rows], generator)

        def turned(values: Tensor) -> Tensor:
            return torch.where(mirrored.view(-1, *[1] * (values.ndim - 1)), values.flip(-1), values)

        return Examples(turned(rgb), turned(self.depth[rows]), turned(self.weight[rows]))

    def joined(self, other: Examples) -> Examples:
        return Examples(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))


def photographs(pairs: Pairs, recipe: Recipe, generator: torch.Generator) -> Examples:
    """``recipe.photographs`` random square crops of random pairs; every scene of theirs is as likely as the others, so
    that one office of many frames does not crowd out the single frames.

    Draws come from the CPU, so that they are the same on every device.
    """
    count, device = recipe.photographs, pairs.rgb.device
    shares = torch.tensor([1 / pairs.scene.count(name) for name in pairs.scene])
    rows = torch.multinomial(shares, count, replacement=True, generator=generator)
    low, high = recipe.crop
    share = low + (high - low) * torch.rand(count, generator=generator)
    height, width = pairs.rgb.shape[-2:]
    side = share * min(height, width)
    middle = [side / 2 + (whole - side) * torch.rand(count, generator=generator) for whole in (width, height)]
    mirror = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    roll = torch.deg2rad(recipe.roll_degrees * signed((count,), generator))
    cos, sin = roll.cos() * side, roll.sin() * side
    # columns: what a step to the right, a step down and the middle of the crop are in the photograph, from -1 to 1
    across = torch.stack([mirror * cos / width, -sin / width, 2 * middle[0] / width - 1], -1)
    down = torch.stack([mirror * sin / height, cos / height, 2 * middle[1] / height - 1], -1)
    affine = torch.stack([across, down], 1).to(device)
    rows, share = rows.to(device), share.to(device)
    grid = F.affine_grid(affine, [count, 1, recipe.size, recipe.size], align_corners=False)
    rgb = F.grid_sample(pairs.rgb[rows].float() / 255, grid, padding_mode="border", align_corners=False)
    depth = F.grid_sample(pairs.depth[rows, None], grid, mode="nearest", padding_mode="zeros", align_corners=False)
    depth = depth[:, 0] * (share / SHOWN)[:, None, None]
    counted = torch.where(pairs.infilled[rows], recipe.infilled_weight, 1.0)[:, None, None]
    return Examples(relit(rgb, generator, recipe.light), depth, (depth > 0) * counted)


def losses(depth: Tensor, examples: Examples, recipe: Recipe) -> dict[str, Tensor]:
    """Of predicted depth [B, H, W]: log-depth error, its shape, its edges; beside them the errors of scenes and of
    photographs, which come last."""
    weight, known = examples.weight, examples.weight > 0
    error = (depth.float().log() - examples.depth.clamp_min(1e-3).log()) * known
    own = weight.sum((1, 2)).clamp_min(1)
    middle = (weight * error).sum((1, 2)) / own
    total = weight.sum().clamp_min(1)
    absolute = (weight * error.abs()).sum((1, 2))
    plain = absolute.sum() / total
    shape = (weight * (error - middle[:, None, None]).abs()).sum() / total
    edges = differences(error, known)
    loss = plain + recipe.shape_weight * shape + recipe.edge_weight * edges
    each = absolute / own
    parts = {"loss": loss, "depth": plain, "shape": shape, "edges": edges, "scenes": each[: recipe.batch].mean()}
    return parts | ({"photographs": each[recipe.batch :].mean()} if recipe.photographs else {})


class Run(SceneRun[Recipe, Trainee, Examples]):
    build = staticmethod(build)

    def __init__(
        self, recipe: Recipe, out: Path, device: torch.device, backbone: Backbone, pairs: Pairs | None
    ) -> None:
        if bool(recipe.photographs) != (pairs is not None):
            raise PullbackError(
                f"rgbd: the recipe takes {recipe.photographs} photographs a step, and {len(pairs or ())} were given. "
                "Name the folder of the pairs, or train on scenes only."
            )
        self.backbone, self.pairs = backbone, None if pairs is None else pairs.to(device)
        super().__init__(recipe, out, device)
        # the same numbers; convolutions on a GPU are faster so
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not self.step:
            rgb = self.examples(self.block())[0]
            taps = features(backbone, rgb, recipe.hooks)
            for network in (self.network, self.average):
                network.start_from(taps, backbone.token_layout(rgb).patches)

    @staticmethod
    def matrices(network: Trainee) -> list[nn.Parameter]:
        return []  # convolutions all of them

    def draw(self, seeds: range) -> Examples:
        return Examples.of_scenes(render(seeds, size=self.config.size, device=self.device))

    def examples(self, block: Examples) -> tuple[Tensor, ...]:
        generator = self.config.generator((1 << 31) + self.step)
        seen = block.varied(self.config.rows(self.step).to(self.device), generator)
        if self.pairs is not None:
            seen = seen.joined(photographs(self.pairs, self.config, generator))
        return seen.rgb, seen.depth, seen.weight

    def losses(self, *examples: Tensor) -> dict[str, Tensor]:
        seen = Examples(*examples)
        with self.autocast():
            taps = features(self.backbone, seen.rgb, self.config.hooks)
            rows, columns = (side // self.config.patch_size for side in seen.rgb.shape[-2:])
            depth = self.network(taps, rows, columns)
        return losses(depth, seen, self.config)


@torch.no_grad()
def features(backbone: Backbone, rgb: Tensor, hooks: Sequence[int]) -> list[Tensor]:
    """Return what the head reads of pictures [B, 3, H, W] in [0, 1]: the hooked layers after the final norm."""
    wanted = backbone.preprocessing
    kept = backbone.features(normalised(rgb, wanted.mean, wanted.std), hooks)
    return [backbone.norm(kept[layer]) for layer in hooks]


def recipe_for(backbone: Backbone, pairs: Pairs | None, **chosen: object) -> Recipe:
    """The recipe of a head for this backbone and these pairs; without pairs all examples of a step are scenes."""
    layers = backbone.depth
    given = {
        "dim": backbone.dim,
        "patch_size": backbone.patch_size,
        "hooks": tuple(layers * part // 4 - 1 for part in (1, 2, 3, 4)),
        "backbone": weights_hash(backbone.model)[:16],
        "pairs": "" if pairs is None else pairs.digest(),
        **chosen,
    }
    recipe = Recipe(**given)  # type: ignore[arg-type]
    if pairs is not None:
        return recipe
    return Recipe(**asdict(recipe) | {"batch": recipe.batch + recipe.photographs, "photographs": 0})


def main() -> None:
    parser = training_parser(__doc__, Recipe)
    parser.add_argument("--model", required=True, help="folder of DINOv2-S")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--rgbd", type=Path, help="folder of RGB-D pairs; those of the split train are used")
    data.add_argument("--scenes-only", action="store_true", help="no photographs, as many more scenes a step")
    parser.add_argument("--passes", type=int, default=Recipe.passes, help="over each block of scenes")
    parser.add_argument("--photographs", type=int, default=Recipe.photographs, help="pairs a step, beside the scenes")
    found = parser.parse_args()
    device, _ = chosen_device(found)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    backbone = load_backbone(found.model, device=device)
    pairs = None if found.scenes_only else read_pairs(found.rgbd, "train")
    recipe = recipe_for(backbone, pairs, photographs=found.photographs, passes=found.passes, **chosen(found))
    run = Run(recipe, found.out, device, backbone, pairs)
    run.train(log_every=found.log_every, save_every=found.save_every, seconds=found.seconds)
    head = run.average.finished().half()
    stored = {"kind": DPT_DEPTH, **asdict(head.config), "fingerprint": fingerprint(backbone)}
    write_network(run.out / "model", head, stored)


if __name__ == "__main__":
    main()
