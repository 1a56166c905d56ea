"""Heads of several layers: one backward pass has the block norms of each, and a group trains every member."""

import copy
from dataclasses import replace

import pytest
import torch

from helpers.families import seeded_vit
from pullback import load_probe
from pullback.decoders import Decoder
from pullback.errors import PullbackError
from pullback.learning.fit import FitConfig, Share, fit
from pullback.learning.target_streams import LayerStream, block_norms_of_layers, principal_components
from pullback.learning.train_head import HeadExamples
from pullback.learning.train_heads import GroupConfig, GroupTask, HeadGroup
from pullback.targets.recipe import targets_of

PICTURES = torch.randint(0, 256, (6, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LAYERS = (1, 3)


@pytest.fixture(scope="module")
def probe():
    return load_probe(copy.deepcopy(seeded_vit()).float().eval(), "cls", 3)  # the model itself is shared by all tests


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 56, 56, generator=torch.Generator().manual_seed(1))


def stream(probe, **options) -> LayerStream:
    return LayerStream(probe, LAYERS, PICTURES, 56, **{"block": 6, "batch": 3, "num_hints": 5, **options})


def test_many_probes_give_the_block_norms_of_every_layer(probe):
    generator = torch.Generator().manual_seed(0)
    features, norms, last = block_norms_of_layers(probe, images(), LAYERS, num_probes=600, generator=generator)
    for place, layer in enumerate(LAYERS):
        own = load_probe(probe.backbone.model, "cls", layer)
        expected = own.features(images())
        torch.testing.assert_close(features[place], expected, rtol=1e-4, atol=1e-4)
        truth = targets_of(own, expected, 4, "exact").block_energy.value.sqrt().float()
        torch.testing.assert_close(norms[place], truth, rtol=0.2, atol=0)
        assert ((norms[place] / truth - 1).mean()).abs() < 0.02
    top = probe.backbone.features(images(), [probe.backbone.depth - 1])[probe.backbone.depth - 1]
    torch.testing.assert_close(last, probe.backbone.norm(top), rtol=1e-4, atol=1e-4)


def test_a_layer_below_the_probe_that_the_decoder_reads_stays_as_it_is(probe):
    both = Decoder("two taps", (1, 5), lambda taps, layout: taps[0][:, 1, :4] * taps[1][:, 0, :4])
    own = replace(probe, decoder=both)
    features = own.features(images())
    generator = torch.Generator().manual_seed(0)
    _, norms, _ = block_norms_of_layers(own, images(), (3,), num_probes=2000, generator=generator)
    truth = targets_of(own, features, 4, "exact").block_energy.value.sqrt().float()
    torch.testing.assert_close(norms[0], truth, rtol=0.2, atol=0)


def test_layers_are_given_in_order(probe):
    for wrong in ((3, 1), (1, 1), (), (probe.backbone.depth,)):
        with pytest.raises(PullbackError, match="layers: expected different layers in ascending order"):
            block_norms_of_layers(probe, images(), wrong, num_probes=1, generator=torch.Generator())


def test_a_block_follows_from_seed_and_number(probe):
    first, again, other = stream(probe)(1), stream(probe)(1), stream(probe)(0)
    for name in ("features", "norms", "hints"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
        assert not torch.equal(getattr(first, name), getattr(other, name)), name
    assert (
        first.features.shape[:3] == (2, 6, 17) and first.norms.shape == (2, 6, 17) and first.hints.shape == (6, 17, 5)
    )
    assert not torch.equal(first.norms, stream(probe, seed=1)(1).norms)


def test_hints_have_spread_one():
    tokens = (
        torch.randn(50, 4, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 5, 2, 1, 0.5, 0.1]) + 3
    )
    mean, directions = principal_components(tokens, 2)
    found = ((tokens - mean) @ directions).flatten(0, 1)
    torch.testing.assert_close(found.T @ found / len(found), torch.eye(2), rtol=0, atol=1e-3)


def test_there_are_no_more_hints_than_channels(probe):
    with pytest.raises(PullbackError, match="num_hints: expected at most 64, got 65"):
        stream(probe, num_hints=65)(0)


def group_and_task(probe):
    blocks = stream(probe)
    torch.manual_seed(0)
    heads = (("early", 0, 16, 1), ("late", 1, 16, 2))
    group = HeadGroup(GroupConfig(64, 5, heads)).start_from(blocks(0))
    judge = blocks(7)
    held_out = [HeadExamples.kept(judge.features[place], judge.norms[place]) for place in range(2)]
    return group, GroupTask(blocks, held_out, group, steps_per_block=3)


def test_every_member_learns_from_its_own_layer(probe):
    group, task = group_and_task(probe)
    before = {name: head.second.weight.clone() for name, head in group.members.items()}
    fitted = fit(group, task, FitConfig(steps=4, batch=3, warmup=1, validate_every=2))
    assert all(not torch.equal(before[name], head.second.weight) for name, head in group.members.items())
    rho = [fitted.scores[f"{name}/rho"] for name in ("early", "late")]
    assert fitted.scores["score"] == pytest.approx(sum(rho) / 2)


def test_a_run_resumes_exactly(probe, tmp_path):
    def run(out, limit=None):
        group, task = group_and_task(probe)

        def stop(step, numbers):
            if step == limit:
                raise KeyboardInterrupt

        try:
            fit(group, task, FitConfig(steps=6, batch=3, warmup=1, validate_every=2), out=out, on_step=stop)
        except KeyboardInterrupt:
            return None
        return group

    whole = run(tmp_path / "whole")
    assert run(tmp_path / "parts", 4) is None
    parts = run(tmp_path / "parts")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


def test_a_block_needs_at_least_one_step(probe):
    group, task = group_and_task(probe)
    with pytest.raises(PullbackError, match="steps_per_block: expected at least 1, got 0"):
        GroupTask(task.blocks, task.held_out, group, 0)


def test_dropout_hides_entries_in_training_alone_and_by_draws_of_the_step(probe):
    group, task = group_and_task(probe)
    dropping = GroupTask(task.blocks, task.held_out, group, 3, dropout=0.5)
    seen = []

    def network(features):
        seen.append(features)
        return group(features)

    share = Share(batch=3)
    plain, once, again = (
        one.loss(network, 0, share, torch.Generator().manual_seed(5))[0].item() for one in (task, dropping, dropping)
    )
    assert once == again != plain
    hidden = seen[1] == 0
    assert 0.45 < hidden.float().mean() < 0.55
    torch.testing.assert_close(seen[1][~hidden], 2 * seen[0][~hidden])
    assert dropping.validate(group) == task.validate(group)
    with pytest.raises(PullbackError, match="dropout: expected a share from 0 up to, but without, 1, got 1"):
        GroupTask(task.blocks, task.held_out, group, 3, dropout=1.0)
