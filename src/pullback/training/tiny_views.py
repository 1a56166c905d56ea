"""The recipe of `tiny-views`: a small VGGT that learns cameras, depth and points from freshly drawn scenes.

    python -m pullback.training.tiny_views --device cuda --out runs/tiny-views

Scenes are drawn block by block with several views each, and a block is seen a few times: every time in another choice
and order of views (the first is the reference), mirrored or not, and in another light. All scenes of a step have
equally many views, another number at every step. Held-out seeds start at `HELD_OUT`.

Everything follows from ``--seed`` and the step number, so a run that was stopped (``--seconds``, or a crash) goes on
exactly where its last checkpoint was written: call the same command again. Checkpoints are files of at most 15 MB.
`log.jsonl` holds a line every ``--log-every`` steps; the averaged weights end up in `model/`, as float16, a folder that
`VGGT.from_pretrained` and `load_probe` take.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pullback.backbones.vggt_checkpoint import VGGT
from pullback.data.scenes import render
from pullback.errors import PullbackError
from pullback.models.vggt import VGGTConfig
from pullback.training.block_schedule import BlockSchedule
from pullback.training.checkpoint_parts import read_parts, write_parts
from pullback.training.evaluate_tiny_views import evaluate
from pullback.training.measurement import rounded
from pullback.training.stacked_muon import StackedMuon
from pullback.training.tiny_views_examples import Views, draw_views
from pullback.training.tiny_views_losses import losses

TYPICAL_FOV = 1.03  # radians, the middle of the training ranges


@dataclass(frozen=True)
class Recipe(BlockSchedule):
    """What decides the weights. Stored in every checkpoint; another recipe does not continue it.

    Cameras are learnt late: for a while their loss stays at that of a blind guess, until tokens of different views find
    each other. Dense losses, a high rate and layer scales that are not tiny shorten this: with 48 pixels, width 64 and
    4 layers it took 30,000 scenes at 4e-3 and 0.3, and 54,000 at 2e-3 and 0.1.
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


def compile_parts(model: VGGT) -> None:
    """Fuse what is between the matrix products, in place: all blocks share one compiled function, for any number of
    views. Eager, a step is thousands of short kernels, and an H200 waits for them half of the time."""
    for block in (*model.aggregator.frame_blocks, *model.aggregator.global_blocks):
        block.compile(dynamic=True)


def _optimizers(model: VGGT, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon (orthogonalised momentum) for the matrices of all blocks, AdamW for everything else."""
    assert model.camera_head is not None
    stacks = (model.aggregator.frame_blocks, model.aggregator.global_blocks, model.camera_head.trunk)
    matrices = [p for stack in stacks for p in stack.parameters() if p.ndim == 2]
    own = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in own]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.99))
    # its step has the size that AdamW's would have, so both share one learning rate
    muon = StackedMuon(matrices, recipe.learning_rate, weight_decay=recipe.weight_decay)
    return [muon, adamw]


class Run:
    """Model, optimisers and running average of the weights at some step, in a folder."""

    def __init__(self, recipe: Recipe, out: Path, device: torch.device, *, compiled: bool = False) -> None:
        self.recipe, self.out, self.device, self.step = recipe, out, device, 0
        self.model = build(recipe).to(device).train()
        self.average = build(recipe).to(device).requires_grad_(False)
        self.optimizers = _optimizers(self.model, recipe)
        if compiled:
            compile_parts(self.model)
        self.drawn: tuple[range, Views] | None = None  # the block in use
        out.mkdir(parents=True, exist_ok=True)
        state = read_parts(out, device)
        if state is not None:
            self._resume(state)

    def save(self) -> None:
        state = {
            "step": self.step,
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        write_parts(state, self.step, self.out)

    def _resume(self, state: dict[str, Any]) -> None:
        stored = {name: tuple(v) if isinstance(v, list) else v for name, v in state["recipe"].items()}
        if stored != asdict(self.recipe):
            changed = [name for name, value in asdict(self.recipe).items() if stored.get(name) != value]
            raise PullbackError(
                f"out: the checkpoint in {self.out} was made by another recipe ({', '.join(changed)} differ). Choose "
                "another folder, or the recipe it was made with."
            )
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, stored_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored_state)
        self.step = state["step"]

    def examples(self) -> Views:
        """Those of the current step; a new block is drawn when the last one is used up."""
        recipe = self.recipe
        seeds, most = recipe.scenes(self.step), recipe.views[1]
        if self.drawn is None or self.drawn[0] != seeds:
            self.drawn = None  # its memory is needed
            self.drawn = seeds, Views.of(render(seeds, size=recipe.size, views=most, device=self.device))
        generator = recipe.generator((1 << 31) + self.step)
        count = int(torch.randint(recipe.views[0], most + 1, (), generator=generator))
        views = draw_views(recipe.batch, most, count, generator)
        mirrored = torch.rand(recipe.batch, generator=generator) < 0.5
        chosen = self.drawn[1].chosen(recipe.rows(self.step).to(self.device), views.to(self.device))
        return chosen.mirrored(mirrored.to(self.device)).relit(generator)

    def advance(self) -> dict[str, Tensor]:
        """One step. What comes back is still on the device: reading it waits for the device, so read it rarely."""
        recipe, examples = self.recipe, self.examples()
        truth = examples.truth()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(self.step)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            output = self.model(examples.rgb, pose_derivative="official", chunk_views=None)
        parts = losses(output, truth, camera_weight=recipe.camera_weight, edge_weight=recipe.edge_weight)
        self.model.zero_grad(set_to_none=True)
        parts["loss"].backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        decay = min(recipe.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)
        self.step += 1
        return {name: part.detach() for name, part in parts.items()} | {"gradient_norm": norm}


def train(
    recipe: Recipe,
    out: Path,
    device: torch.device,
    *,
    log_every: int,
    save_every: int,
    seconds: float,
    compiled: bool = False,
) -> Run:
    """Advance to the last step, or for about so many seconds; log and checkpoint on the way."""
    run = Run(recipe, out, device, compiled=compiled)
    begun, resumed_at = time.perf_counter(), run.step
    while run.step < recipe.steps and time.perf_counter() - begun < seconds:
        numbers = run.advance()
        if run.step % log_every == 0 or run.step == recipe.steps:
            spent = time.perf_counter() - begun
            line: dict[str, Any] = {"step": run.step, **{name: rounded(value) for name, value in numbers.items()}}
            line |= {"seconds": round(spent, 1), "ms_per_step": round(1e3 * spent / (run.step - resumed_at), 1)}
            with (out / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
            print(line, flush=True)
        if run.step % save_every == 0:
            run.save()
    run.save()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-compile", action="store_true", help="on a GPU; on a CPU nothing is compiled")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after about so long; call again to go on")
    parser.add_argument("--evaluate", type=int, default=500, help="held-out scenes at the end")
    options = parser.parse_args()
    recipe = Recipe(steps=options.steps, batch=options.batch, learning_rate=options.learning_rate, seed=options.seed)
    device = torch.device(options.device)
    run = train(
        recipe,
        options.out,
        device,
        log_every=options.log_every,
        save_every=options.save_every,
        seconds=options.seconds,
        compiled=device.type == "cuda" and not options.no_compile,
    )
    run.average.eval().half().save_pretrained(options.out / "model")
    if options.evaluate:
        # of what was written
        print(json.dumps(evaluate(run.average.float(), count=options.evaluate, views=4, device=device)))


if __name__ == "__main__":
    main()
