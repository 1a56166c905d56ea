"""Two processes take the same steps as one, and the first of them alone writes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import fit_in_processes

SCRIPT = Path(fit_in_processes.__file__)
TESTS = SCRIPT.parents[1]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def torchrun(script: Path, *arguments: object) -> None:
    """In two processes that talk over the loopback device."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"]
    command = [*launcher, f"--master_port={free_port()}", script, *arguments]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[dict[str, dict[str, torch.Tensor]], Path]:
    folder = tmp_path_factory.mktemp("alone")
    head = fit_in_processes.head_run(folder / "head")
    spn = fit_in_processes.spn_run(folder / "spn")
    return {"head": head.state_dict(), "spn": spn.state_dict()}, folder


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_processes_give_the_weights_of_one_also_after_a_stop_and_process_0_alone_writes(alone, tmp_path):
    torchrun(SCRIPT, tmp_path)
    expected, folder = alone
    found = [torch.load(tmp_path / f"weights-{rank}.pt") for rank in (0, 1)]
    start = {"head": fit_in_processes.tiny_head().state_dict(), "spn": fit_in_processes.tiny_spn().state_dict()}
    for kind in ("head", "spn"):
        moved = max((expected[kind][name] - start[kind][name]).abs().max().item() for name in expected[kind])
        assert moved > 1e-2
        for name, value in expected[kind].items():
            assert torch.equal(found[0][kind][name], found[1][kind][name])
            torch.testing.assert_close(found[0][kind][name], value, rtol=0, atol=1e-6)
        scores = [_scores(path / kind / "metrics.jsonl") for path in (folder, tmp_path / "process-0")]
        assert list(scores[1]) == [3, 6, 8]
        assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    drm, alone_drm = [part["drm"] for part in found], fit_in_processes.drm_run(None).state_dict()
    assert all(torch.equal(drm[0][name], drm[1][name]) for name in alone_drm)
    assert list(_scores(tmp_path / "process-0" / "drm" / "metrics.jsonl")) == [3, 6, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["process-0", "weights-0.pt", "weights-1.pt"]


def _scores(path: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["score"] for line in lines}
