"""The recipe of tiny-scenes at toy size: it learns, resumes exactly, and depends on its seed alone."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from pullback.errors import PullbackError
from pullback.scenes.render import render
from pullback.scenes.splits import HELD_OUT
from recipes.optim import eager_gradients
from recipes.scene_run import write_parts
from recipes.tiny_scenes import Examples, Recipe, Run

TOY = Recipe(
    steps=4, batch=4, block=4, passes=2, size=28, width=24, layers=4, heads=2, hooks=(0, 1, 2, 3), channels=8, warmup=2
)
CPU = torch.device("cpu")


def run(recipe: Recipe, out, **limits) -> Run:
    going = Run(recipe, out, CPU)
    going.train(log_every=1, save_every=1, seconds=limits.get("seconds", 1e9))
    return going


def weights(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in [*run.network.parameters(), *run.average.parameters()]])


def test_a_run_that_was_stopped_goes_on_exactly_where_it_was(tmp_path):
    whole = run(TOY, tmp_path / "whole")
    first = Run(TOY, tmp_path / "parts", CPU)
    for _ in range(2):
        first.advance()
    first.save()
    resumed = run(TOY, tmp_path / "parts")
    assert resumed.step == whole.step == 4
    assert torch.equal(weights(resumed), weights(whole))


def test_lines_after_the_last_checkpoint_are_written_again(tmp_path):
    first = Run(TOY, tmp_path, CPU)
    first.save()
    first.train(log_every=1, save_every=1000, seconds=1e9)
    for part in tmp_path.glob("checkpoint-*"):
        part.unlink()
    Run(TOY, tmp_path, CPU).train(log_every=1, save_every=1000, seconds=1e9)
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_a_checkpoint_that_calls_its_network_a_model_goes_on(tmp_path):
    first = Run(TOY, tmp_path, CPU)
    first.advance()
    state = {"recipe": asdict(TOY), **first.state()}
    write_parts({("model" if name == "network" else name): part for name, part in state.items()}, 1, tmp_path)
    again = Run(TOY, tmp_path, CPU)
    assert again.step == 1 and torch.equal(weights(again), weights(first))


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path):
    again = [weights(run(TOY, tmp_path / name)) for name in ("a", "b")]
    other = weights(run(replace(TOY, seed=1), tmp_path / "c"))
    assert torch.equal(*again)
    assert not torch.equal(again[0], other)


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    run(TOY, tmp_path)
    with pytest.raises(PullbackError, match=r"other settings \(learning_rate: 0.003 there, 1.0 asked for"):
        Run(replace(TOY, learning_rate=1.0), tmp_path, CPU)


def test_a_compiled_run_is_not_replayed_as_a_graph_because_its_losses_copy_from_the_host(tmp_path):
    compiled = Run(TOY, tmp_path, CPU, compiled=True)
    assert compiled.gradients is eager_gradients and compiled.advance()["loss"] > 0


def test_the_loss_falls_on_new_scenes(tmp_path):
    longer = replace(TOY, steps=60, batch=8, block=8, passes=1, learning_rate=3e-3)
    logged = Run(longer, tmp_path, CPU)
    curve = [logged.advance()["depth"] for _ in range(60)]
    assert sum(curve[-10:]) < 0.8 * sum(curve[:10])


def test_no_recipe_reaches_a_held_out_scene_and_runs_share_none():
    last = Recipe(seed=1023, steps=1 << 20, batch=1 << 10, passes=1)
    assert last.scenes(last.steps - 1).stop <= HELD_OUT
    first = Recipe(seed=0, steps=1 << 20, batch=1 << 10, passes=1)
    assert first.scenes(first.steps - 1).stop <= Recipe(seed=1).scenes(0).start
    for wrong in ({"seed": 1024}, {"seed": -1}, {"steps": 1 << 21, "batch": 1 << 10, "passes": 1}):
        with pytest.raises(PullbackError, match="no held-out scene is seen"):
            Recipe(**wrong)


def test_each_pass_sees_every_scene_of_its_block_once():
    recipe = Recipe(steps=12, batch=4, block=8, passes=3)
    passes = [torch.cat([recipe.rows(step) for step in (first, first + 1)]) for first in range(0, 12, 2)]
    assert all(sorted(rows.tolist()) == list(range(8)) for rows in passes)
    assert len({tuple(rows.tolist()) for rows in passes}) == 6
    assert [recipe.scenes(step).start for step in range(12)] == [0] * 6 + [8] * 6
    assert not torch.equal(recipe.rows(0), replace(recipe, seed=1).rows(0))
    with pytest.raises(PullbackError, match="block=10: expected a multiple of batch=4"):
        Recipe(batch=4, block=10)


def test_mirrored_examples_keep_picture_and_depth_together():
    examples = Examples.of(render(range(32), size=28))
    varied = examples.varied(torch.Generator().manual_seed(0))
    mirrored = (varied.depth == examples.depth.flip(-1)).flatten(1).all(1)
    kept = (varied.depth == examples.depth).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert 8 < mirrored.sum() < 24
    for index in range(32):
        same = examples.rgb[index].flip(-1) if mirrored[index] else examples.rgb[index]
        pair = torch.stack([same[0].flatten(), varied.rgb[index, 0].flatten()])  # red alone: colours shift
        assert torch.corrcoef(pair)[0, 1] > 0.95  # relit, not moved
        valid = examples.valid[index].flip(-1) if mirrored[index] else examples.valid[index]
        assert torch.equal(varied.valid[index], valid)
