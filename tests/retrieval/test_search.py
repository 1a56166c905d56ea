"""Exact search against all pairs in float64, candidates against exact search, and what is refused."""

import sys

import pytest
import torch

import pullback as pb
from helpers.galleries import DIM, TOKENS, filled, moody_metric, names, random_features, small_metric
from pullback.errors import NumericsError, PullbackError, ShapeError
from pullback.learning.distilled_metric import MetricItems, pairwise_distances
from pullback.retrieval import gallery as galleries
from pullback.retrieval import records
from pullback.retrieval import search as searching
from pullback.retrieval.gallery import Gallery
from pullback.retrieval.records import Form
from pullback.retrieval.search import Index, distances_to


@pytest.fixture(scope="module")
def metric():
    return small_metric()


@pytest.fixture
def shards_of_seven(monkeypatch):
    """So that 30 items lie in five shards, and are converted three at a time."""
    words = sum(Form.of(small_metric()).words.values())
    monkeypatch.setattr(galleries, "SHARD_BYTES", 7 * 2 * words)
    monkeypatch.setitem(searching._FLOATS, "cpu", 3 * DIM * TOKENS)


@torch.no_grad()
def truth(metric, queries, items):
    """All distances between what is stored of features, in float64."""
    ends = []
    for features in (queries, items):
        stored = metric(features).half()
        projected, weights = stored.projected.double(), stored.weights.double()
        ends.append(MetricItems(projected, weights, torch.einsum("bn,bnk->bk", weights, projected)))
    return pairwise_distances(*ends)


def rows(keys):
    return torch.tensor([[int(key.removeprefix("item-")) for key in best] for best in keys])


def test_exact_search_finds_what_all_pairs_in_float64_say(tmp_path, metric, shards_of_seven):
    gallery = filled(tmp_path / "g", metric=metric)
    assert gallery.info()["bytes"] == 30 * gallery.info()["bytes_per_item"]
    queries = random_features(40, seed=1)  # more than are searched at a time
    expected = truth(metric, queries, random_features(30)).sort(dim=1)
    found = gallery.search(queries, k=5)
    assert found.method == "exact" and found.compared == 30
    assert torch.equal(rows(found.keys), expected.indices[:, :5])
    torch.testing.assert_close(found.distances, expected.values[:, :5].float(), rtol=1e-6, atol=0)


def test_a_scan_is_all_pairs_up_to_the_rounding_of_float32(tmp_path, metric, shards_of_seven):
    gallery = filled(tmp_path / "g", metric=metric)
    queries = metric(random_features(3, seed=1)).half()
    found = [distances_to(queries, block.columns(), torch.device("cpu")) for block in gallery.index.blocks]
    assert [part.shape[1] for part in found] == [7, 7, 7, 7, 2]
    expected = truth(metric, random_features(3, seed=1), random_features(30))
    size = expected.max()
    torch.testing.assert_close(torch.cat(found, 1).double(), expected, rtol=0, atol=1e-5 * float(size))


@pytest.mark.parametrize("method", ["exact", "candidates"])
def test_an_image_finds_itself_first_at_distance_zero(tmp_path, metric, method):
    gallery = filled(tmp_path / "g", metric=metric)
    found = gallery.search(random_features(30), k=2, method=method)
    assert [best[0] for best in found.keys] == names(30)
    assert torch.equal(found.distances[:, 0], torch.zeros(30)) and (found.distances[:, 1] > 0).all()


@pytest.mark.parametrize("method", ["exact", "candidates"])
def test_ties_go_by_the_order_of_adding(tmp_path, metric, method):
    gallery = Gallery.create(tmp_path / "g", metric, device="cpu")
    same, other = random_features(1), random_features(1, seed=9)
    gallery.add_features(["other"], other)
    gallery.add_features(names(70), same.expand(70, -1, -1), sha256=[f"hash {number}" for number in range(70)])
    everything = {"candidates": 71} if method == "candidates" else {}
    assert gallery.search(same, k=5, method=method, **everything).keys == [names(5)]
    assert gallery.search(other, k=3, method=method, **everything).keys == [["other", *names(2)]]


def test_more_results_than_items_are_all_items(tmp_path, metric):
    gallery = filled(tmp_path / "g", 4, metric)
    for method in ("exact", "candidates", "transport"):
        found = gallery.search(random_features(2, seed=1), k=10, method=method)
        assert found.distances.shape == (2, 4) and [len(set(best)) for best in found.keys] == [4, 4]
        assert (found.distances.diff() >= 0).all()


@pytest.mark.parametrize("by_faiss", [True, False])
def test_candidates_are_found_with_and_without_faiss(tmp_path, metric, monkeypatch, shards_of_seven, by_faiss):
    if by_faiss:
        pytest.importorskip("faiss", reason="faiss is not installed (the extra pullback[retrieval])")
    else:
        monkeypatch.setitem(sys.modules, "faiss", None)
        monkeypatch.setattr(searching, "has_faiss", lambda: False)
    gallery = filled(tmp_path / "g", metric=metric)
    gallery.remove(names(3, start=6))
    queries = random_features(40, seed=1)
    exact = gallery.search(queries, k=4, method="exact")
    found = gallery.search(queries, k=4, method="candidates", candidates=27)  # all of them
    assert found.method == "candidates" and found.compared == 27
    assert found.keys == exact.keys and torch.equal(found.distances, exact.distances)
    monkeypatch.setattr(searching, "SURE", 1)  # never more than asked for
    fewer = gallery.search(queries, k=4, method="candidates", candidates=6)
    assert fewer.compared == 6
    hits = [len(set(one) & set(other)) for one, other in zip(fewer.keys, exact.keys, strict=True)]
    assert sum(hits) / (4 * 40) > 0.5  # 6 drawn at random of 27 would find 0.22
    assert not set(names(3, start=6)) & {key for best in (*fewer.keys, *found.keys) for key in best}


def test_more_is_looked_at_where_the_best_are_not_well_inside(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "SKETCHED", 1)  # a poor sketch, so that it takes many
    monkeypatch.setattr(searching, "WIDER", 1)
    gallery = filled(tmp_path / "g", 120, moody_metric())
    queries = random_features(40, seed=1)
    exact = gallery.search(queries, k=4, method="exact")

    def hits(sure):
        monkeypatch.setattr(searching, "SURE", sure)
        found = gallery.search(queries, k=4, method="candidates", candidates=8)
        shared = [len(set(one) & set(other)) for one, other in zip(found.keys, exact.keys, strict=True)]
        return sum(shared) / (4 * 40), found.compared

    (once, looked), (sure, more) = hits(1), hits(4)
    assert looked == 8 < more and sure > once
    assert hits(10**9) == (1.0, 120)  # nothing is sure: everything is looked at


@pytest.mark.parametrize("count", [50, 12_000])
def test_nearest_embeddings_are_the_same_with_faiss_and_with_torch(count):
    """From 10,000 on FAISS looks into some of its cells alone, so it may miss a few."""
    pytest.importorskip("faiss", reason="faiss is not installed (the extra pullback[retrieval])")
    draw = torch.Generator().manual_seed(0)
    embedded, queries = torch.randn(count, 4, generator=draw), torch.randn(9, 4, generator=draw)
    kept = torch.arange(100, 100 + count)
    distances = torch.cdist(queries.double(), embedded.double())
    by_faiss, by_torch = (build(embedded, kept) for build in (searching._nearest_by_faiss, searching._nearest_by_torch))
    for wanted in (5, count // 2, count):
        expected = distances.topk(wanted, largest=False)
        assert torch.equal(by_torch(queries, wanted).sort().values, expected.indices.sort().values + 100)
        found = by_faiss(queries, wanted) - 100
        shares = [
            len(set(one.tolist()) & set(other.tolist())) / wanted
            for one, other in zip(found, expected.indices, strict=True)
        ]
        assert min(shares) > 0.9 and (count > 1000 or min(shares) == 1)
        gathered = distances.gather(1, found)
        assert (gathered.diff() >= -1e-5).all(), "nearest first"


def test_a_sketch_with_all_eigenvectors_is_the_item(metric):
    form = Form.of(metric)
    assert form.tokens == TOKENS == len(form.scales)  # fewer tokens than a sketch may have
    items = metric(random_features(5)).half()
    sketched = form.sketch_of(items)
    plain = MetricItems(sketched.projected.float(), sketched.weights.float(), sketched.aggregates)
    one = pairwise_distances(plain, plain)
    expected = truth(metric, random_features(5), random_features(5)).float()
    off = ~torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(one[off], expected[off], rtol=2e-3, atol=0)


def test_embeddings_are_those_of_the_constant_metric(metric):
    form = Form.of(metric)
    items = metric(random_features(6)).half()
    rows_kept = 32 // metric.config.rank
    expected = metric.embed(items, share=1.0)[:, : rows_kept * metric.config.rank]
    torch.testing.assert_close(form.embedding(form.sketch_of(items)), expected, rtol=1e-2, atol=1e-2)


def test_large_galleries_take_candidates_by_themselves_and_say_so(tmp_path, metric, monkeypatch):
    gallery = filled(tmp_path / "g", metric=metric)
    monkeypatch.setattr(galleries, "FROM", 30)
    monkeypatch.setattr(galleries, "has_faiss", lambda: True)
    assert gallery.search(random_features(1), k=1).method == "candidates"
    monkeypatch.setattr(galleries, "has_faiss", lambda: False)
    assert gallery.search(random_features(1), k=1).method == "exact"
    monkeypatch.setattr(galleries, "has_faiss", lambda: True)
    gallery.remove("item-000")
    assert gallery.search(random_features(1), k=1).method == "exact"


def test_recall_counts_what_candidates_find_of_the_nearest_other_items(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "SKETCHED", 1)
    monkeypatch.setattr(searching, "SURE", 1)
    gallery = filled(tmp_path / "g", 60, moody_metric())
    everything = gallery.recall(k=5, queries=20, candidates=60)
    assert (everything.recall, everything.recall_se, everything.queries) == (1.0, 0.0, 20)
    few = gallery.recall(k=5, queries=60, candidates=6)
    assert 5 / 59 < few.recall < 1 and few.recall_se > 0
    assert gallery.recall(k=5, queries=60, candidates=6).recall == few.recall
    assert few.exact_seconds > 0 and few.candidate_seconds > 0


def test_searching_by_transport_is_for_small_galleries(tmp_path, metric, monkeypatch):
    gallery = filled(tmp_path / "g", 8, metric)
    gallery.remove("item-001")
    found = gallery.search(random_features(1), k=3, method="transport")
    assert found.method == "transport" and found.compared == 7 and found.keys[0][0] == "item-000"
    assert "item-001" not in gallery.search(random_features(2)[1:], k=7, method="transport").keys[0]
    monkeypatch.setattr(galleries, "MOST_TRANSPORTED", 6)
    with pytest.raises(PullbackError, match="method: transport is for galleries of at most 6 items, this one has 7"):
        gallery.search(random_features(1), method="transport")


BAD = {
    "width": (lambda: random_features(1, dim=DIM + 1), {}, ShapeError, r"query: expected features \[B, 10, 12\]"),
    "tokens": (lambda: random_features(1, tokens=TOKENS + 1), {}, ShapeError, "Use images of one size"),
    "none": (lambda: random_features(0), {}, ShapeError, r"query: expected .*, got \[0, 10, 12\]"),
    "nan": (lambda: random_features(2).index_fill(0, torch.tensor([1]), torch.nan), {}, NumericsError, "image 1"),
    "large": (lambda: 1e9 * random_features(1), {}, PullbackError, "query: some projections .* do not fit"),
    "k": (lambda: random_features(1), {"k": 0}, PullbackError, "k: expected a whole number of at least 1"),
    "method": (lambda: random_features(1), {"method": "fast"}, PullbackError, "method: expected one of auto, exact"),
    "candidates": (lambda: random_features(1), {"candidates": 3}, PullbackError, "at least as many as results, 10"),
    "images": (lambda: torch.zeros(1, 3, 28, 28), {}, PullbackError, "backbone: the metric does not say what model"),
    "file": (lambda: "nowhere.jpg", {}, PullbackError, "query='nowhere.jpg': no such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_queries_are_refused(tmp_path, metric, case):
    query, choices, error, message = BAD[case]
    with pytest.raises(error, match=message):
        filled(tmp_path / "g", 12, metric).search(query(), **choices)


def test_an_empty_gallery_cannot_be_searched(tmp_path, metric):
    gallery = Gallery.create(tmp_path / "g", metric, device="cpu")
    with pytest.raises(PullbackError, match=r"holds no items yet. Add images first"):
        gallery.search(random_features(1))


def test_an_index_in_memory_is_searched_like_one_on_disk(tmp_path, metric):
    form = Form.of(metric)
    stored = form.pack(metric(random_features(30)).half())
    index = Index.of(form, [stored[:11], stored[11:]], [4], torch.device("cpu"))
    queries = metric(random_features(5, seed=1)).half()
    gallery = filled(tmp_path / "g", metric=metric)
    gallery.remove("item-004")
    assert torch.equal(index.exact(queries, 6).rows, rows(gallery.search(random_features(5, seed=1), k=6).keys))


def test_a_gallery_is_public():
    assert pb.Gallery is Gallery
