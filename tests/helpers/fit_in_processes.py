"""What test_fit_parallel.py runs in each of several processes: python fit_in_processes.py FOLDER."""

import sys
from pathlib import Path

import torch

from helpers.toys import DIM, TOKENS, head_task, normal, rule, spn_task, tiny_head, tiny_spn
from pullback.learning.distilled_metric import DistilledMetric
from pullback.learning.fit import FitConfig, fit
from pullback.learning.train_drm import MetricExamples, MetricTask
from pullback.learning.train_head import HeadExamples

CONFIG = FitConfig(steps=8, batch=4, learning_rate=5e-3, warmup=2, validate_every=3, ema=0.5)


class Stopped(Exception):
    pass


def head_run(out: Path | None, first: bool = True, **options) -> torch.nn.Module:
    """In float64: where a gradient is zero but for round-off (the bias of the keys), Adam makes steps of its sign.
    Processes other than the first start from other weights, which must not matter."""
    head = tiny_head(0 if first else 7).double()
    fit(head, head_task(dtype=torch.float64), CONFIG, out=out, **options)
    return head


def spn_run(out: Path | None, first: bool = True, **options) -> torch.nn.Module:
    spn = tiny_spn(0 if first else 7).double()
    fit(spn, spn_task(dtype=torch.float64), CONFIG, out=out, **options)
    return spn


def drm_run(out: Path | None, first: bool = True, **options) -> torch.nn.Module:
    """Its network is called twice in a step, for distances and for the distillation."""
    torch.manual_seed(0 if first else 7)
    metric = DistilledMetric(DIM, 2, 16, 2)
    features = normal(24, TOKENS, DIM, dtype=torch.float32)
    examples = MetricExamples.of(features, features.mean(1))
    task = MetricTask(examples, examples, "relative_l2", HeadExamples.kept(features, rule(features)))
    fit(metric, task, CONFIG, out=out, **options)
    return metric


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    own = folder / f"process-{rank}"  # as on machines that share no folder

    def stop(step: int, numbers) -> None:
        if step == 5:
            raise Stopped

    try:
        head_run(own / "head", rank == 0, on_step=stop)
    except Stopped:
        head = head_run(own / "head", rank == 0)
    spn = spn_run(own / "spn", rank == 0)
    drm = drm_run(own / "drm", rank == 0)
    states = {"head": head.state_dict(), "spn": spn.state_dict(), "drm": drm.state_dict()}
    torch.save(states, folder / f"weights-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
