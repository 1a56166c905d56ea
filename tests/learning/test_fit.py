"""The training loop: what it keeps, where it stops, and that a run that was stopped goes on as if nothing had been."""

import errno
import json
import math
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.progress import Heard
from helpers.toys import head_task, normal, tiny_head
from pullback.errors import FileError, PullbackError
from pullback.learning import fit as fitting
from pullback.learning.fit import FitConfig, Fitted, Share, check_going_on, fit
from pullback.learning.head import ImportanceHead

CONFIG = FitConfig(steps=11, batch=4, learning_rate=1e-2, warmup=2, validate_every=3, ema=0.8)
VALIDATIONS = [3, 6, 9, 11]


class Stopped(BaseException):
    """As Ctrl-C would."""


def stop_after(step: int):
    def on_step(done: int, numbers) -> None:
        if done == step:
            raise Stopped

    return on_step


def run(out=None, config: FitConfig = CONFIG, task=None, **options) -> tuple[ImportanceHead, Fitted]:
    head = tiny_head()
    return head, fit(head, task or head_task(), config, out=out, **options)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def weights(network) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Scripted:
    """Validations with given scores, whatever the network says; notes its weights before steps and in validations."""

    def __init__(self, network: ImportanceHead, scores: list[float]) -> None:
        self.network, self.scores = network, list(scores)
        self.before_step: list[dict] = []
        self.validated: list[dict] = []

    def loss(self, network, step, share, generator):
        self.before_step.append(weights(self.network))
        features = torch.randn(share.batch, 5, 8, generator=generator)
        return network(features).square().mean(), {}

    def validate(self, network):
        self.validated.append(weights(self.network))
        return {"score": self.scores[len(self.validated) - 1]}


def scripted_run(scores: list[float], config: FitConfig = CONFIG) -> tuple[Scripted, ImportanceHead, Fitted]:
    head = tiny_head()
    task = Scripted(head, scores)
    return task, head, fit(head, task, config)


# ---- stopping and going on


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    head, fitted = run(folder)
    return weights(head), fitted, (folder / "metrics.jsonl").read_text("utf-8")


def test_every_validation_is_a_line_of_the_log(tmp_path):
    _, fitted = run(tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == VALIDATIONS
    assert all(math.isfinite(line[name]) for line in lines(tmp_path) for name in ("loss", "rho", "rho_patches"))
    best = max(lines(tmp_path), key=lambda line: line["score"])
    assert fitted.step == best["step"] and fitted.scores["score"] == best["score"] and fitted.steps == 11


@pytest.mark.parametrize("stops", [[3], [6], [9], [11], [1], [5], [3, 9], [3, 6, 9, 10]], ids=str)
def test_a_run_that_was_stopped_ends_as_the_uninterrupted_one_bit_for_bit(uninterrupted, tmp_path, stops):
    expected, fitted, log = uninterrupted
    for step in stops:
        with pytest.raises(Stopped):
            run(tmp_path, on_step=stop_after(step))
    head, again = run(tmp_path)
    assert same(weights(head), expected)
    assert again == fitted
    assert (tmp_path / "metrics.jsonl").read_text("utf-8") == log


def test_a_finished_run_takes_no_more_steps_and_gives_its_best_weights(uninterrupted, tmp_path):
    run(tmp_path)
    steps = []
    head, fitted = run(tmp_path, on_step=lambda step, numbers: steps.append(step))
    assert steps == [] and fitted == uninterrupted[1] and same(weights(head), uninterrupted[0])


@pytest.mark.parametrize("moment", ["before the checkpoint", "in the middle of it"])
@pytest.mark.parametrize("save", [1, 3], ids=["first", "third"])
def test_killed_while_it_writes_a_checkpoint_it_goes_on_from_the_last_whole_one(
    uninterrupted, tmp_path, monkeypatch, save, moment
):
    calls = []
    whole = torch.save

    def interrupted(state, file) -> None:
        calls.append(file)
        if len(calls) < save:
            return whole(state, file)
        if moment == "in the middle of it":
            whole(state, file)
            file.truncate(file.tell() // 2)
        raise Stopped

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(torch, "save", interrupted)
        run(tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == VALIDATIONS[:save]  # one more line than the checkpoint knows
    steps = []
    head, fitted = run(tmp_path, on_step=lambda step, numbers: steps.append(step))
    assert steps[0] == 3 * (save - 1) + 1
    assert same(weights(head), uninterrupted[0]) and fitted == uninterrupted[1]
    assert (tmp_path / "metrics.jsonl").read_text("utf-8") == uninterrupted[2]


def test_half_a_line_in_the_log_is_written_again(uninterrupted, tmp_path):
    with pytest.raises(Stopped):
        run(tmp_path, on_step=stop_after(6))
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 9, "lo')
    run(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text("utf-8") == uninterrupted[2]


def test_a_checkpoint_of_one_optimizer_by_its_old_name_goes_on(uninterrupted, tmp_path):
    with pytest.raises(Stopped):
        run(tmp_path, on_step=stop_after(6))
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    (state["optimizer"],) = state.pop("optimizers")
    torch.save(state, tmp_path / "checkpoint.pt")
    assert same(weights(run(tmp_path)[0]), uninterrupted[0])


def test_what_a_killed_run_left_unfinished_is_removed(tmp_path):
    (tmp_path / ".checkpoint.pt.abc.tmp").write_bytes(b"half of it")
    run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "metrics.jsonl"]


def test_checkpoints_are_written_by_time_between_validations(tmp_path, monkeypatch):
    """Steps of 12 s: two of them may be lost, with a third it would be more than 30 s."""
    clock, saved = [0.0], []
    take_step, save = fitting.Training.take_step, fitting._Run.save

    def slow(self, gradients):
        clock[0] += 12.0
        return take_step(self, gradients)

    monkeypatch.setattr(fitting.Training, "take_step", slow)
    monkeypatch.setattr(fitting._Run, "save", lambda self: (saved.append(self.step), save(self)))
    monkeypatch.setattr(fitting.time, "perf_counter", lambda: clock[0])
    run(tmp_path, replace(CONFIG, validate_every=100))
    assert saved == [2, 4, 6, 8, 10, 11]
    assert [line["step"] for line in lines(tmp_path)] == [11], "the log has validations alone"


def test_a_run_goes_on_from_a_checkpoint_between_two_validations(uninterrupted, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "SAVE_EVERY", 0.0)
    with pytest.raises(Stopped):
        run(tmp_path, on_step=stop_after(5))
    seen = []
    head, _ = run(tmp_path, on_step=lambda step, numbers: seen.append(step))
    assert seen[0] == 6, "step 5 is not taken again"
    expected, _, log = uninterrupted
    assert same(weights(head), expected) and (tmp_path / "metrics.jsonl").read_text("utf-8") == log


def test_a_run_stops_after_its_time_and_goes_on_to_the_same_end(uninterrupted, tmp_path, monkeypatch):
    clock, take_step = [0.0], fitting.Training.take_step

    def slow(self, gradients):
        clock[0] += 1.0
        return take_step(self, gradients)

    with monkeypatch.context() as patched:
        patched.setattr(fitting.Training, "take_step", slow)
        patched.setattr(fitting.time, "perf_counter", lambda: clock[0])
        steps = [run(tmp_path, seconds=4.0)[1].steps for _ in range(2)]
    assert steps == [4, 8], "each call has its own time"
    head, ended = run(tmp_path)
    expected, _, log = uninterrupted
    assert ended.steps == 11
    assert same(weights(head), expected) and (tmp_path / "metrics.jsonl").read_text("utf-8") == log


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"nonsense"])
def test_a_damaged_checkpoint_is_named(tmp_path, content):
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(FileError, match=r"checkpoint\.pt: cannot be read \(.*\)\. Delete it to train from the start"):
        run(tmp_path)


def test_a_full_disk_keeps_the_last_checkpoint_and_leaves_nothing_else(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(Stopped):
        run(tmp_path, on_step=stop_after(4))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with monkeypatch.context() as patched, pytest.raises(FileError, match=r"checkpoint\.pt: cannot be written \(No sp"):
        patched.setattr(os, "fsync", full)
        run(tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "metrics.jsonl"]
    run(tmp_path)


def test_what_would_be_refused_is_refused_before_the_features_are_computed(tmp_path):
    run(tmp_path)
    check_going_on(tiny_head(), CONFIG, tmp_path, {})
    check_going_on(tiny_head(), CONFIG, None, {})
    with pytest.raises(PullbackError, match="seed: 0 there, 1 asked for"):
        check_going_on(tiny_head(), replace(CONFIG, seed=1), tmp_path, {})
    with pytest.raises(PullbackError, match="other: None there, 2 asked for"):
        check_going_on(tiny_head(), CONFIG, tmp_path, {"other": 2})


def test_a_score_that_is_not_a_number_is_null_in_the_log(tmp_path):
    class Partly(Scripted):
        def validate(self, network):
            return {**super().validate(network), "rho_patches": math.nan}

    head = tiny_head()
    fit(head, Partly(head, [0.0] * 4), CONFIG, out=tmp_path)
    assert [line["rho_patches"] for line in lines(tmp_path)] == [None] * 4


def test_progress_counts_the_steps_of_before_at_once(tmp_path):
    with pytest.raises(Stopped):
        run(tmp_path, on_step=stop_after(6))
    heard = Heard()
    run(tmp_path, progress=heard)
    assert heard.totals == {"training": 11} and heard.counts == {"training": [6, 1, 1, 1, 1, 1]}


def test_patience_that_was_used_up_before_the_stop_counts(tmp_path):
    config = replace(CONFIG, steps=100, patience=3)
    scores = [1.0, 0.9, 0.8, 0.7, 0.6]

    def stopped_after(validations: int):
        head = tiny_head()
        task = Scripted(head, scores)
        with pytest.raises(Stopped):
            fit(head, task, config, out=tmp_path, on_step=stop_after(3 * validations))

    stopped_after(3)
    head = tiny_head()
    assert fit(head, Scripted(head, scores[3:]), config, out=tmp_path).steps == 12


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learning_rate": 2e-2}, "learning_rate: 0.01 there, 0.02 asked for"),
        ({"seed": 1, "batch": 8}, "batch: 4 there, 8 asked for; seed: 0 there, 1 asked for"),
        ({"steps": 20}, "steps: 11 there, 20 asked for"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_checkpoint_of_another_configuration_is_refused(tmp_path, change, named):
    run(tmp_path)
    with pytest.raises(
        PullbackError, match=rf"out: .*checkpoint.pt holds a training run with other settings \({named}\)"
    ):
        run(tmp_path, replace(CONFIG, **change))


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(PullbackError, match=r"other settings \(network.width: 16 there, 24 asked for\)"):
        fit(tiny_head(width=24), head_task(), CONFIG, out=tmp_path)


def test_scores_in_the_network_do_not_make_it_another_one(tmp_path):
    run(tmp_path)
    fit(tiny_head().describe(scores={"rho": 0.5}), head_task(), CONFIG, out=tmp_path)


# ---- which weights


def test_the_best_weights_are_left_in_the_network_and_not_the_last():
    task, head, fitted = scripted_run([0.1, 0.7, 0.3, 0.2])
    assert same(weights(head), task.validated[1])
    assert not same(weights(head), task.validated[3])
    assert fitted == Fitted({"score": 0.7}, 6, 11)


def test_validated_are_the_averaged_weights():
    config = replace(CONFIG, steps=30, validate_every=15)
    task, _, _ = scripted_run([0.0, 1.0], config)
    after_step = task.before_step[1:]
    average = task.before_step[0]
    for step, current in enumerate(after_step):
        decay = min(config.ema, (1 + step) / (10 + step))
        average = {name: decay * average[name] + (1 - decay) * current[name] for name in average}
        if step == 14:
            for name, value in task.validated[0].items():
                torch.testing.assert_close(value, average[name])
    assert not same(task.validated[0], after_step[14])


def test_validation_leaves_the_training_as_it_is():
    often = scripted_run([0.0] * 11, replace(CONFIG, validate_every=1))[0]
    seldom = scripted_run([0.0], replace(CONFIG, validate_every=11))[0]
    assert all(same(a, b) for a, b in zip(often.before_step, seldom.before_step, strict=True))


@pytest.mark.parametrize(
    ("scores", "steps", "best"),
    [
        ([1.0, 0.9, 0.8, 2.0], 9, 3),
        ([1.0, 0.9, 1.1, 0.9, 1.0, 3.0], 15, 9),
        ([1.0, 1.0, 1.0, 2.0], 9, 3),
    ],
    ids=["falling", "better once", "no better"],
)
def test_it_stops_after_that_many_validations_without_a_better_score(scores, steps, best):
    _, _, fitted = scripted_run(scores, replace(CONFIG, steps=100, patience=2))
    assert fitted == Fitted({"score": max(scores[: steps // 3])}, best, steps)


def test_a_score_that_is_nan_is_a_clear_error():
    with pytest.raises(PullbackError, match=r"score: NaN after 6 steps. Lower the learning rate"):
        scripted_run([0.5, math.nan])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps: expected a whole number of at least 1, got 0"),
        ({"batch": 0}, "batch: expected a whole number of at least 1, got 0"),
        ({"validate_every": 0}, "validate_every: expected a whole number of at least 1, got 0"),
        ({"patience": 0}, "patience: expected at least 1 validation, or None for no limit, got 0"),
        ({"precision": "fp8"}, "precision: expected one of float32, bf16, got 'fp8'"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(PullbackError, match=message):
        FitConfig(**settings)


# ---- steps


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    assert same(weights(run()[0]), weights(run()[0]))
    others = [weights(run(config=replace(CONFIG, seed=seed))[0]) for seed in (1, 2)]
    assert not same(others[0], weights(run()[0])) and not same(*others)


def test_every_step_and_seed_draws_other_numbers():
    drawn = []

    class Drawing(Scripted):
        def loss(self, network, step, share, generator):
            drawn.append(torch.rand(1, generator=generator.clone_state()).item())
            return super().loss(network, step, share, generator)

    for seed in (0, 1, 1 << 40):
        head = tiny_head()
        fit(head, Drawing(head, [0.0] * 4), replace(CONFIG, seed=seed))
    assert len(set(drawn)) == len(drawn) == 33


def test_the_rate_rises_in_a_line_and_falls_with_a_cosine():
    config = FitConfig(steps=110, warmup=10, learning_rate=2.0)
    assert [config.rate(step) for step in (0, 4, 9, 10)] == pytest.approx([0.2, 1.0, 2.0, 2.0])
    assert config.rate(60) == pytest.approx(1.0) and config.rate(35) == pytest.approx(1 + math.cos(math.pi / 4))
    assert config.rate(110) == pytest.approx(0) and FitConfig(warmup=0).rate(0) == FitConfig().learning_rate


def test_weights_decay_in_matrices_only():
    class Nothing(Scripted):
        def loss(self, network, step, share, generator):
            return 0 * network(torch.zeros(1, 5, 8)).sum(), {}

    head, config = tiny_head(), FitConfig(steps=1, warmup=0, learning_rate=0.1, weight_decay=0.5, ema=0.0)
    before = weights(head)
    fit(head, Nothing(head, [0.0]), config)
    for name, value in head.state_dict().items():
        torch.testing.assert_close(value, before[name] * (0.95 if value.ndim > 1 else 1.0))


def test_gradients_are_clipped():
    config = replace(CONFIG, weight_decay=0.0, clip=1e-12)  # far below the epsilon of Adam: nothing moves
    head, _ = run(config=config)
    for name, value in tiny_head().state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], value, rtol=0, atol=1e-4)
    moved = run(config=replace(config, clip=1.0))[0].project.weight - tiny_head().project.weight
    assert moved.abs().max() > 1e-3


def test_bf16_reaches_the_network_and_nothing_around_it():
    inside, outside = set(), set()

    class Watching(Scripted):
        def loss(self, network, step, share, generator):
            features = normal(share.batch, 5, 8, dtype=torch.float32)
            scores = network(features)
            outside.update({(features @ features.mT).dtype, scores.dtype})
            return (scores.mT @ scores).mean(), {}

        def validate(self, network):
            features = normal(2, 5, 8, dtype=torch.float32)
            outside.update({network(features).dtype, (features @ features.mT).dtype})
            return super().validate(network)

    for precision, expected in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        head = tiny_head()
        head.project.register_forward_hook(lambda module, arguments, output: inside.add(output.dtype))
        fit(head, Watching(head, [0.0] * 4), replace(CONFIG, precision=precision))
        assert inside == {expected} and outside == {torch.float32}
        assert {value.dtype for value in head.state_dict().values()} == {torch.float32}
        inside.clear()


# ---- TensorBoard


def test_without_the_tensorboard_package_nothing_is_missing_until_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run(tmp_path / "without")
    with pytest.raises(PullbackError, match="tensorboard: the package is missing: pip install tensorboard"):
        run(tmp_path / "with", tensorboard=True)


def test_tensorboard_needs_a_folder():
    with pytest.raises(PullbackError, match="tensorboard: expected a folder to write to, got out=None"):
        run(tensorboard=True)


def test_tensorboard_gets_the_numbers_of_the_log_and_forgets_what_will_be_written_again(tmp_path, monkeypatch):
    boards = []

    class Board:
        def __init__(self, folder: str, purge_step: int) -> None:
            self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False
            boards.append(self)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars.append((name, value, step))

        def close(self) -> None:
            self.closed = True

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Board))
    with pytest.raises(Stopped):
        run(tmp_path, tensorboard=True, on_step=stop_after(8))
    run(tmp_path, tensorboard=True)
    first, second = boards
    assert first.closed and second.closed
    assert first.folder == str(tmp_path / "tensorboard") and (first.purge_step, second.purge_step) == (1, 7)
    written = [(name, value, line["step"]) for line in lines(tmp_path) for name, value in line.items()]
    assert first.scalars + second.scalars == [entry for entry in written if entry[0] != "step"]


# ---- one of several processes


def test_shares_of_a_batch_make_the_batch():
    rows = torch.arange(12)
    parts = [Share(12, rank, 3).of(rows) for rank in range(3)]
    assert {len(part) for part in parts} == {4}
    assert sorted(torch.cat(parts).tolist()) == rows.tolist()


def test_a_batch_that_processes_cannot_share_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    with pytest.raises(PullbackError, match="batch: expected a multiple of the 3 processes, got 4"):
        run()
