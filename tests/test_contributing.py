"""The examples of CONTRIBUTING.md run as they stand, one after the other."""

import re
from pathlib import Path

import torch

from helpers.registry import kept_tables
from pullback import registry

PAGE = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_a_score_a_decoder_and_a_backbone_can_be_added_as_described(capsys):
    torch.manual_seed(0)
    namespace: dict = {}
    examples = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(examples) == 4
    with kept_tables():
        for number, code in enumerate(examples, start=1):
            exec(compile(code, f"{PAGE.name}, example {number}", "exec"), namespace)
        namespace["register"]()
        assert "contrast" in registry.SCORES and "small-vit" in registry.BACKBONES
        assert [entry.name for entry in registry.DECODERS[-2:]] == ["cells-RxC", "quarters"]
    printed = capsys.readouterr().out.split()
    assert printed[:3] == ["True", "True", "True"]
    assert 0 < float(printed[3]) <= 1
    assert printed[4:] == ["True"]
