"""The recipe of `tiny-views`: a small VGGT that learns cameras, depth and points from freshly drawn scenes.

    python -m recipes.tiny_views --device cuda --out runs/tiny-views

Scenes are drawn block by block with several views each, and a block is seen a few times: every time in another choice
and order of views (the first is the reference), mirrored or not, and in another light. All scenes of a step have
equally many views, another number at every step; all of them are predicted cameras for, and half of them depth and
points, which is most of a step's work. Held-out seeds start at `HELD_OUT`.

Truth (`Truth`) is given in the frame of the first view and in units of the scene: everything is divided by the mean
distance of the points that the views show from the first camera (sky shows none). Pictures alone do not tell metres.
The losses are those of VGGT (Wang et al. 2025, section 3.4) in the scales that small networks learn well in:

    camera: sum_i 0.6^(I-1-i) (|T| + |q| + |fov| / 2), mean absolute errors of each refinement round i.
    depth and points: mean of c e - alpha log c over pixels that show something, with the confidence c, plus the
    differences of neighbouring errors, which keep edges sharp. e is the error of log depth, or the length of the error
    of the points under sign(p) log(1 + |p|), which is how both heads write their output: near things count as much as
    far ones.

A run that was stopped (``--seconds``, or a crash) goes on exactly where its last checkpoint was written: call the same
command again. Checkpoints are files of at most 15 MB. `log.jsonl` holds a line every ``--log-every`` steps; the
averaged weights end up in `model/`, as float16, a folder that `VGGT.from_pretrained` and `load_probe` take.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pullback.errors import PullbackError
from pullback.scenes.render import SceneBatch, render
from pullback.vggt.checkpoint import VGGT
from pullback.vggt.network import VGGTConfig, VGGTOutput
from pullback.vggt.network.pose import encode_pose, unproject_depth
from recipes.scene_run import SceneRecipe, SceneRun, draw_weights, signed, train_from_command_line

TYPICAL_FOV = 1.03  # radians, the middle of the training ranges
ROUND_DECAY = 0.6  # an earlier round of the camera head counts so much less than the next
CONFIDENCE_PRICE = 0.2  # alpha: at the best confidence c = alpha / e
FOV_WEIGHT = 0.5
_DISTANCES = (1, 4, 16)  # pixels between neighbours
_NEAREST = 1e-4


@dataclass(frozen=True)
class Recipe(SceneRecipe):
    """Cameras are learnt late: for a while their loss stays at that of a blind guess, until tokens of different views
    find each other. Dense losses, a high rate and layer scales that are not tiny shorten this: with 48 pixels, width 64
    and 4 layers it took 30,000 scenes at 4e-3 and 0.3, and 54,000 at 2e-3 and 0.1.
    """

    steps: int = 6_000
    batch: int = 96  # scenes
    views: tuple[int, int] = (2, 6)  # fewest and most of a step; the most are drawn of each scene
    block: int = 1_536  # scenes drawn at a time
    passes: int = 4  # over each block
    seed: int = 0
    learning_rate: float = 4e-3
    warmup: int = 400
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float = 0.999
    camera_weight: float = 5.0
    edge_weight: float = 0.5
    size: int = 112
    patch: int = 8  # a patch has 192 numbers: a convolution to 128 channels loses little of it
    width: int = 128
    layers: int = 8  # of frame and global attention each
    heads: int = 4
    registers: int = 4
    mlp_ratio: float = 2.5
    layer_scale: float = 0.3
    camera_layers: int = 1
    features: int = 32  # of the dense heads
    channels: tuple[int, ...] = (32, 48, 64, 64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.views) != 2 or not 2 <= self.views[0] <= self.views[1]:
            raise PullbackError(f"views={self.views}: expected (fewest, most), at least 2, such as (2, 6).")

    def model(self) -> VGGTConfig:
        """The dense heads read the end of each quarter of the layers."""
        return VGGTConfig(
            img_size=self.size,
            patch_size=self.patch,
            patch_embed="conv",
            embed_dim=self.width,
            depth=self.layers,
            num_heads=self.heads,
            num_register_tokens=self.registers,
            mlp_ratio=self.mlp_ratio,
            layer_scale=self.layer_scale,
            camera_trunk_depth=self.camera_layers,
            dpt_features=self.features,
            dpt_out_channels=self.channels,
            hook_layers=tuple(max(1, self.layers * quarter // 4) - 1 for quarter in (1, 2, 3, 4)),
        )


def build(recipe: Recipe) -> VGGT:
    """The network with its initial weights, the same for the same seed on every device."""
    model = VGGT(recipe.model())
    generator = draw_weights(model, recipe.seed)
    with torch.no_grad():
        # Published ones start at 1e-6, from which short training would first have to tell the reference view.
        for token in (model.aggregator.camera_token, model.aggregator.register_token):
            token.normal_(0, 0.5, generator=generator)
        camera = model.camera_head
        assert camera is not None and camera.pose_branch.fc2.bias is not None
        # Each round adds the bias once: the last one starts at the identity, with fields of view that are positive.
        start = camera.pose_branch.fc2.bias.new_tensor([0, 0, 0, 0, 0, 0, 1.0, TYPICAL_FOV, TYPICAL_FOV])
        camera.pose_branch.fc2.bias.copy_(start / camera.iterations)
    return model


@dataclass(frozen=True, eq=False)
class Truth:
    """Of scenes seen in S views each; lengths in units of the scene."""

    poses: Tensor  # [B, S, 9]: world-to-camera translation, quaternion (scalar last), fields of view
    depth: Tensor  # [B, S, H, W], 0 where nothing is known
    points: Tensor  # [B, S, H, W, 3], in the first camera's frame
    valid: Tensor  # [B, S, H, W] bool: no sky
    extrinsics: Tensor  # [B, S, 3, 4], the first is [I | 0]
    scale: Tensor  # [B], metres per unit


@dataclass(frozen=True, eq=False)
class Views:
    """V views of each of B scenes, as they were drawn."""

    rgb: Tensor  # [B, V, 3, H, W] in [0, 1]
    depth: Tensor  # [B, V, H, W], metres
    valid: Tensor  # [B, V, H, W] bool: no sky
    pose: Tensor  # [B, V, 4, 4], world to camera
    intrinsics: Tensor  # [B, V, 3, 3]

    @classmethod
    def of(cls, scenes: SceneBatch) -> Views:
        return cls(scenes.rgb, scenes.depth, ~scenes.sky, scenes.pose, scenes.intrinsics)

    def chosen(self, scenes: Tensor, views: Tensor) -> Views:
        """The views [n, S] of the scenes [n]."""
        rows = scenes[:, None]
        return Views(*(values[rows, views] for values in self._all()))

    def relit(self, generator: torch.Generator) -> Views:
        """Another light for each scene, and a slightly different one for each of its views. Draws come from the CPU, so
        that they are the same on every device."""
        count, views = self.rgb.shape[:2]
        gain, contrast = (
            1 + 0.2 * signed((count, 1, 1, 1, 1), generator) + 0.05 * signed((count, views, 1, 1, 1), generator)
            for _ in range(2)
        )
        tint = 1 + 0.1 * signed((count, 1, 3, 1, 1), generator)
        gain, contrast, tint = (values.to(self.rgb, non_blocking=True) for values in (gain, contrast, tint))
        mean = self.rgb.mean((-3, -2, -1), keepdim=True)
        rgb = (((self.rgb - mean) * contrast + mean * gain) * tint).clamp(0, 1)
        return Views(rgb, self.depth, self.valid, self.pose, self.intrinsics)

    def mirrored(self, which: Tensor) -> Views:
        """The scenes ``which`` [B] bool as a mirror shows them: with M = diag(-1, 1, 1), a camera [R | t] becomes
        [M R M | M t]. The axis goes through the middle of the picture, so intrinsics stay."""
        signs = self.pose.new_tensor([-1.0, 1.0, 1.0, 1.0])
        pose = torch.where(which[:, None, None, None], signs[:, None] * self.pose * signs, self.pose)
        rgb = torch.where(which[:, None, None, None, None], self.rgb.flip(-1), self.rgb)
        depth, valid = (
            torch.where(which[:, None, None, None], values.flip(-1), values) for values in (self.depth, self.valid)
        )
        return Views(rgb, depth, valid, pose, self.intrinsics)

    def truth(self) -> Truth:
        """What is to be predicted, the first view being the reference."""
        extrinsics = relative_extrinsics(self.pose)
        centred = self.intrinsics.clone()
        centred[..., :2, 2] -= 0.5  # pixel centres lie at j + 1/2 here, at whole numbers for `unproject_depth`
        points = unproject_depth(self.depth[..., None], extrinsics, centred)
        distance = torch.where(self.valid, points.norm(dim=-1), 0.0)
        scale = distance.sum((1, 2, 3)) / self.valid.sum((1, 2, 3)).clamp_min(1)
        extrinsics = torch.cat([extrinsics[..., :3], extrinsics[..., 3:] / scale[:, None, None, None]], -1)
        height, width = self.depth.shape[-2:]
        return Truth(
            encode_pose(extrinsics, self.intrinsics, (height, width)),
            self.depth / scale[:, None, None, None],
            points / scale[:, None, None, None, None],
            self.valid,
            extrinsics,
            scale,
        )

    def _all(self) -> tuple[Tensor, ...]:
        return self.rgb, self.depth, self.valid, self.pose, self.intrinsics


def relative_extrinsics(pose: Tensor) -> Tensor:
    """World-to-camera [B, S, 4, 4] -> [B, S, 3, 4] with the first camera as the world: R_i R_0^T, t_i - R_i R_0^T t_0.

    In float64, because the world's origin may be far from both cameras.
    """
    precise = pose.double()
    rotation, shift = precise[..., :3, :3], precise[..., :3, 3:]
    turn = rotation @ rotation[:, :1].mT
    return torch.cat([turn, shift - turn @ shift[:, :1]], -1).to(pose.dtype)


def draw_views(count: int, drawn: int, views: int, generator: torch.Generator) -> Tensor:
    """[count, views]: for each scene some of its ``drawn`` views in random order; the first becomes the reference."""
    return torch.rand(count, drawn, generator=generator).argsort(1)[:, :views]


def losses(
    output: VGGTOutput,
    poses: Tensor,
    depth: Tensor,
    points: Tensor,
    valid: Tensor,
    *,
    camera_weight: float,
    edge_weight: float,
) -> dict[str, Tensor]:
    """All parts, and their weighted sum as "loss"; the truth as in `Truth`, depth and points of any of its views."""
    camera = camera_loss(output.pose_enc_list, poses)
    depth_error = torch.where(valid, _log(output.depth[..., 0]) - _log(depth), 0.0)[..., None]
    point_error = torch.where(valid[..., None], signed_log(output.world_points) - signed_log(points), 0.0)
    point_size = (point_error.square().sum(-1) + 1e-12).sqrt()  # a length of 0 has no derivative
    total, parts = camera_weight * camera, {"camera": camera}
    for name, error, size, confidence in (
        ("depth", depth_error, depth_error[..., 0].abs(), output.depth_conf),
        ("points", point_error, point_size, output.world_points_conf),
    ):
        jumps = edges(error, valid)
        total = total + confident(size, confidence, valid) + edge_weight * jumps
        parts |= {name: _mean(size, valid), f"{name} edges": jumps}
    return {"loss": total, **parts}


def camera_loss(rounds: Sequence[Tensor], truth: Tensor) -> Tensor:
    """Pose encodings [B, S, 9] of all rounds, against those of the cameras."""
    total = truth.new_zeros(())
    for index, pose in enumerate(rounds):
        translation, quaternion, fov = (part.mean() for part in (pose - truth).abs().split((3, 4, 2), -1))
        total = total + ROUND_DECAY ** (len(rounds) - 1 - index) * (translation + quaternion + FOV_WEIGHT * fov)
    return total


def confident(error: Tensor, confidence: Tensor, valid: Tensor) -> Tensor:
    """Mean of c e - alpha log c over the valid pixels; [B, S, H, W] each."""
    return _mean(confidence * error - CONFIDENCE_PRICE * confidence.log(), valid)


def edges(error: Tensor, valid: Tensor) -> Tensor:
    """Mean |difference| of errors [B, S, H, W, n] at neighbours in a row or column, over several distances."""
    parts = []
    for step in _DISTANCES:
        for axis in (2, 3):
            length = error.shape[axis] - step
            if length < 1:
                continue
            both = valid.narrow(axis, 0, length) & valid.narrow(axis, step, length)
            change = error.narrow(axis, step, length) - error.narrow(axis, 0, length)
            parts.append(_mean(change.abs().sum(-1), both))
    return torch.stack(parts).mean()


def signed_log(points: Tensor) -> Tensor:
    """sign(p) log(1 + |p|), the inverse of the point head's activation."""
    return points.sign() * points.abs().log1p()


def _log(depth: Tensor) -> Tensor:
    return depth.clamp_min(_NEAREST).log()


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, values, 0.0).sum() / valid.sum().clamp_min(1)


class Run(SceneRun[Recipe, VGGT, Views]):
    graphed = True

    build = staticmethod(build)

    @staticmethod
    def matrices(network: VGGT) -> list[nn.Parameter]:
        assert network.camera_head is not None
        stacks = (network.aggregator.frame_blocks, network.aggregator.global_blocks, network.camera_head.trunk)
        return [p for stack in stacks for p in stack.parameters() if p.ndim == 2]

    @staticmethod
    def compile(network: VGGT) -> None:
        """Compile the blocks, which share one function, for any number of views."""
        for block in (*network.aggregator.frame_blocks, *network.aggregator.global_blocks):
            block.compile(dynamic=True)

    def draw(self, seeds: range) -> Views:
        recipe = self.config
        return Views.of(render(seeds, size=recipe.size, views=recipe.views[1], device=self.device))

    def views(self, block: Views) -> Views:
        """Those of the current step: some views of some scenes."""
        recipe, most = self.config, self.config.views[1]
        generator = recipe.generator((1 << 31) + self.step)
        count = int(torch.randint(recipe.views[0], most + 1, (), generator=generator))
        views = draw_views(recipe.batch, most, count, generator)
        mirrored = torch.rand(recipe.batch, generator=generator) < 0.5
        rows, views, mirrored = (
            draw.to(self.device, non_blocking=True) for draw in (recipe.rows(self.step), views, mirrored)
        )
        return block.chosen(rows, views).mirrored(mirrored).relit(generator)

    def examples(self, block: Views) -> tuple[Tensor, ...]:
        """Pictures, the views for which dense heads are asked, and the truth."""
        views = self.views(block)
        count = views.rgb.shape[1]
        order = torch.randperm(count, generator=self.config.generator((3 << 30) + self.step))
        dense = order[: (count + 1) // 2].to(self.device, non_blocking=True)
        truth = views.truth()
        seen = (values.index_select(1, dense) for values in (truth.depth, truth.points, truth.valid))
        return views.rgb, dense, truth.poses, *seen

    def losses(self, *examples: Tensor) -> dict[str, Tensor]:
        rgb, dense, *truth = examples
        with self.autocast():
            output = self.network(rgb, pose_derivative="official", chunk_views=None, dense_views=dense)
        recipe = self.config
        return losses(output, *truth, camera_weight=recipe.camera_weight, edge_weight=recipe.edge_weight)


def main() -> None:
    from recipes.evaluate_tiny_views import evaluate  # which imports this module

    run, scenes = train_from_command_line(__doc__, Recipe, Run, evaluate=500)
    run.average.eval().half().save_pretrained(run.out / "model")
    if scenes:
        # of what was written
        print(json.dumps(evaluate(run.average.float(), count=scenes, views=4, device=run.device)))


if __name__ == "__main__":
    main()
