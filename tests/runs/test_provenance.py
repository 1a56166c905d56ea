"""Where a number came from."""

import os
import re
import subprocess
import sys

import torch
from torch import nn

import pullback
from pullback.runs.provenance import commit, machine, now, provenance, weights_hash


def test_the_origin_of_a_result_is_complete_and_plain():
    found = provenance(torch.device("cpu"))
    assert found["device"] == "cpu"
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["pullback"] == pullback.__version__
    assert re.fullmatch(r".+, \d+ cores, \d+ GiB", machine(torch.device("cpu")))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", now())


def test_the_commit_is_that_of_the_checkout_or_unknown():
    found = commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found)


def test_asking_for_the_commit_tells_changes_and_leaves_the_index_alone(tmp_path, monkeypatch):
    """Nothing is written into the user's repository: a run that is stopped just then must not leave it locked."""
    package = tmp_path / "package"
    package.mkdir()
    module = package / "__init__.py"
    module.write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(pullback, "__file__", str(module))
    index = tmp_path / ".git" / "index"
    os.utime(module, (1, 1))  # the index no longer knows whether it is as it was
    before = index.stat().st_mtime_ns, index.stat().st_ino
    clean = commit()
    assert clean is not None and re.fullmatch(r"[0-9a-f]{40}", clean)
    assert (index.stat().st_mtime_ns, index.stat().st_ino) == before
    module.write_text("changed = True")
    assert commit() == f"{clean}-dirty"


def test_the_hash_of_weights_knows_names_shapes_and_values():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    known = weights_hash(layer)
    assert weights_hash(nn.Sequential(layer)) != known, "names count"
    with torch.no_grad():
        layer.bias[0] += 1e-6
    assert weights_hash(layer) != known, "values count"
    assert weights_hash(layer.double()) != weights_hash(layer.float()), "precision counts"


def test_the_room_is_imported_without_torch():
    code = (
        "import sys\n"
        "import pullback.runs.files, pullback.runs.rows, pullback.runs.settings, pullback.runs.documents\n"
        "import pullback.runs.progress, pullback.runs.provenance\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "False", run.stderr
