"""The recipe of `tiny-views`: a small VGGT that learns cameras, depth and points from freshly drawn scenes.

    python -m recipes.tiny_views --device cuda --out runs/tiny-views

Scenes are drawn block by block with several views each, and a block is seen a few times: every time in another choice
and order of views (the first is the reference), mirrored or not, and in another light. All scenes of a step have
equally many views, another number at every step; all of them are predicted cameras for, and half of them depth and
points, which is most of a step's work. Held-out seeds start at `HELD_OUT`.

Everything follows from ``--seed`` and the step number, so a run that was stopped (``--seconds``, or a crash) goes on
exactly where its last checkpoint was written: call the same command again. Checkpoints are files of at most 15 MB.
`log.jsonl` holds a line every ``--log-every`` steps; the averaged weights end up in `model/`, as float16, a folder that
`VGGT.from_pretrained` and `load_probe` take.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pullback.errors import PullbackError
from pullback.scenes.render import render
from pullback.vggt.checkpoint import VGGT
from pullback.vggt.network import VGGTConfig
from recipes.evaluate_tiny_views import evaluate
from recipes.scene_run import SceneRecipe, SceneRun, parse
from recipes.tiny_views_examples import Views, draw_views
from recipes.tiny_views_losses import losses

TYPICAL_FOV = 1.03  # radians, the middle of the training ranges


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
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
                spread = 0.02 if isinstance(module, nn.Linear) else module.weight[0].numel() ** -0.5
                module.weight.normal_(0, spread, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        # Published ones start at 1e-6, from which short training would first have to tell the reference view.
        for token in (model.aggregator.camera_token, model.aggregator.register_token):
            token.normal_(0, 0.5, generator=generator)
        camera = model.camera_head
        assert camera is not None and camera.pose_branch.fc2.bias is not None
        # Each round adds the bias once: the last one starts at the identity, with fields of view that are positive.
        start = camera.pose_branch.fc2.bias.new_tensor([0, 0, 0, 0, 0, 0, 1.0, TYPICAL_FOV, TYPICAL_FOV])
        camera.pose_branch.fc2.bias.copy_(start / camera.iterations)
    return model


class Run(SceneRun[Recipe, VGGT, Views]):
    graphed = True

    @staticmethod
    def build(recipe: Recipe) -> VGGT:
        return build(recipe)

    @staticmethod
    def matrices(model: VGGT) -> list[nn.Parameter]:
        assert model.camera_head is not None
        stacks = (model.aggregator.frame_blocks, model.aggregator.global_blocks, model.camera_head.trunk)
        return [p for stack in stacks for p in stack.parameters() if p.ndim == 2]

    @staticmethod
    def compile(model: VGGT) -> None:
        """All blocks share one compiled function, for any number of views."""
        for block in (*model.aggregator.frame_blocks, *model.aggregator.global_blocks):
            block.compile(dynamic=True)

    def draw(self, seeds: range) -> Views:
        recipe = self.recipe
        return Views.of(render(seeds, size=recipe.size, views=recipe.views[1], device=self.device))

    def views(self, block: Views) -> Views:
        """Those of the current step: some views of some scenes."""
        recipe, most = self.recipe, self.recipe.views[1]
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
        order = torch.randperm(count, generator=self.recipe.generator((3 << 30) + self.step))
        dense = order[: (count + 1) // 2].to(self.device, non_blocking=True)
        truth = views.truth()
        seen = (values.index_select(1, dense) for values in (truth.depth, truth.points, truth.valid))
        return views.rgb, dense, truth.poses, *seen

    def losses(self, *examples: Tensor) -> dict[str, Tensor]:
        rgb, dense, *truth = examples
        with self.autocast():
            output = self.model(rgb, pose_derivative="official", chunk_views=None, dense_views=dense)
        recipe = self.recipe
        return losses(output, *truth, camera_weight=recipe.camera_weight, edge_weight=recipe.edge_weight)


def main() -> None:
    options, chosen = parse(__doc__, Recipe, evaluate=500)
    run = Run(Recipe(**chosen), options.out, options.device, compiled=options.compiled)
    run.train(log_every=options.log_every, save_every=options.save_every, seconds=options.seconds)
    run.average.eval().half().save_pretrained(options.out / "model")
    if options.evaluate:
        # of what was written
        found = evaluate(run.average.float(), count=options.evaluate, views=4, device=options.device)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
