"""The kernels of a removal do what the functions of `matching` say, on a GPU or in Triton's interpreter."""

import importlib

import pytest
import torch

from helpers.triton_kernels import DEVICE, why_not
from pullback.pruning import matching
from pullback.pruning.matching import Matching

pytest.importorskip("triton")


@pytest.fixture
def kernels():
    if reason := why_not():
        pytest.skip(reason)
    return importlib.import_module("pullback.pruning.stage_kernels")


@pytest.mark.parametrize("count", [1, 50, 197])
def test_ranks(kernels, count):
    torch.manual_seed(0)
    scores = torch.randn(3, count, device=DEVICE).round(decimals=1)  # with ties
    scores[0, 0], scores[1, count // 2], scores[2, -1] = torch.nan, torch.inf, -torch.inf
    found = kernels.ranks(scores)
    stable = torch.where(scores.isnan(), torch.inf, scores).sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(found.long(), stable.argsort(1)), "equal ones in their order"


def test_the_most_similar_token(kernels):
    torch.manual_seed(0)
    tokens = torch.randn(2, 53, 24, device=DEVICE)
    cosine, place = matching.cosines(tokens), matching.ranks(torch.rand(2, 53, device=DEVICE))
    reach = torch.where(torch.rand(2, 53, device=DEVICE) < 0.7, place, 53).int()
    found = kernels.most_similar(cosine, reach, None, place)
    wanted = matching.most_similar(cosine, reach[:, None] < place[..., None])
    assert torch.equal(found[0], wanted[0])
    some = wanted[0] > matching.NOBODY
    assert torch.equal(found[1][some], wanted[1][some])
    assert (~some).any(), "the highest ranked one has nobody"
    removed = torch.stack([torch.randperm(53)[:20] for _ in range(2)]).to(DEVICE)
    allowed = torch.rand(2, 53, device=DEVICE) < 0.5
    found = kernels.most_similar(cosine, (~allowed).int(), removed)
    wanted = matching.most_similar(matching.rows(cosine, removed), allowed[:, None])
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("width", [40, 64])
def test_merging(kernels, width, shares):
    torch.manual_seed(0)
    order = torch.stack([torch.randperm(21) for _ in range(3)])
    kept, removed = order[:, :9].sort(1).values, order[:, 9:].sort(1).values
    destination = torch.randint(0, 4, removed.shape)  # several go to one, and nothing to most
    merged = torch.rand(removed.shape)
    parts = (kept, removed, destination, merged if shares else merged < 0.7)
    split = Matching(*(part.to(DEVICE) for part in parts))
    x, weights = torch.randn(3, 21, width, device=DEVICE), torch.rand(3, 21, device=DEVICE)
    weights[0] = 0
    goes = torch.where(split.merged > 0, split.destination, -1).int()
    mean = kernels.merge(x, weights, split.kept, split.removed, goes, split.merged.float())
    torch.testing.assert_close(mean, split.merge(x, weights))
    into = (destination[:, None] == torch.arange(9)[:, None]) & (split.merged.cpu() > 0)[:, None]
    alone = ~into.any(-1)
    assert torch.equal(mean[alone], split.keep(x)[alone]), "a token into which nothing is merged stays"


def test_operators_have_fakes(kernels):
    torch.manual_seed(0)
    x = torch.randn(2, 20, 16, device=DEVICE)
    cosine, place = matching.cosines(x), torch.arange(20, device=DEVICE, dtype=torch.int32).expand(2, -1)
    removed = torch.arange(4, device=DEVICE).expand(2, -1)
    rest = (torch.arange(4, 20, device=DEVICE).expand(2, -1), removed, removed.int(), torch.ones(2, 4, device=DEVICE))
    some = {
        torch.ops.pullback.ranks: (x[..., 0],),
        torch.ops.pullback.most_similar: (cosine, place, None, place),
        torch.ops.pullback.merge: (x, x[..., 0].abs(), *rest),
    }
    for operator, arguments in some.items():
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.pullback.most_similar, (cosine, place, removed), test_utils=("test_faketensor",))
