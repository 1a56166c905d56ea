"""From rows of targets back to features: the same pixels, what is refused, what is held in memory, what is held out."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.pictures import SIZE, SMALL, encoded, small_probe, write_pictures
from pullback.data.images import PixelFormat
from pullback.errors import ImageError, PullbackError
from pullback.learning.train_head import (
    StoredRows,
    feature_reader,
    fingerprint,
    kept,
    readable_rows,
    rows_of_table,
    split_by_image,
)
from pullback.targets.compute import compute_table, compute_targets
from pullback.targets.recipe import targets_of
from pullback.targets.store import TargetStore
from pullback.targets.table import TargetTable


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "photos")


@pytest.fixture(scope="module")
def table(photos) -> TargetTable:
    """Two crops of each of seven images."""
    return compute_table(small_probe(), photos, crops=2, **SMALL)[0]


@pytest.fixture(scope="module")
def store(photos, tmp_path_factory) -> TargetStore:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")
    return compute_targets(small_probe(), photos, out=tmp_path_factory.mktemp("store"), crops=2, **SMALL)


def reader_of(table: TargetTable, photos: Path):
    probe = small_probe()
    return feature_reader(probe, rows_of_table(table, photos), probe.pixel_format(SIZE))


# ---- the same features


def test_features_that_are_read_again_have_the_targets_of_the_table(photos, table):
    assert {crop.flip for crop in table.crops} == {True, False} and table.crop_index == (1, 2) * 7
    features = reader_of(table, photos)(torch.arange(len(table)))
    again = targets_of(small_probe(), features, 3)
    torch.testing.assert_close(again.importance.float(), table.importance)
    torch.testing.assert_close(again.singular_values.float(), table.singular_values)
    assert (table.importance[0] - table.importance[1]).abs().max() > 1e-2  # which differ between crops


def test_rows_are_read_in_the_order_they_are_asked_for(photos, table):
    read = reader_of(table, photos)
    everything = read(torch.arange(len(table)))
    torch.testing.assert_close(read(torch.tensor([9, 2, 2])), everything[torch.tensor([9, 2, 2])])
    some = StoredRows(table, read).select([5, 9, 2])
    torch.testing.assert_close(some.features(torch.tensor([2, 0])), everything[torch.tensor([2, 5])])


def test_plain_images_are_what_the_probe_reads(photos):
    probe = small_probe()
    table, _ = compute_table(probe, photos, **SMALL)
    expected = probe.features(probe.read_images([photos / key for key in table.keys], SIZE).pixels)
    torch.testing.assert_close(reader_of(table, photos)(torch.arange(len(table))), expected)


def test_features_carry_the_layers_that_a_decoder_reads_below_the_probe(photos):
    import pullback as pb
    from helpers.families import model_of

    probe = pb.load_probe(model_of("depth-v2"), "depth-2x2", 2)
    reader = feature_reader(probe, readable_rows(photos, probe.pixel_format(28)), probe.pixel_format(28))
    features = reader(torch.tensor([1, 0]))
    assert set(features.below) and probe(features).shape == (2, 2, 2)
    stored = StoredRows(compute_table(probe, photos, rank=2, size=28)[0], reader)
    plain = stored.examples().features(torch.tensor([1, 0]))
    assert type(plain) is torch.Tensor and torch.equal(plain, features.as_subclass(torch.Tensor))


# ---- what is refused


def test_an_image_that_has_changed_since_is_refused(photos, table, tmp_path):
    copy = shutil.copytree(photos, tmp_path / "photos")
    (copy / "03.png").write_bytes(encoded(77))
    read = reader_of(table, copy)
    assert read(torch.tensor([0])).shape == (1, 7, 24)
    with pytest.raises(ImageError, match=r"source: 03.png has changed since it was first read\. Targets .* anew"):
        read(torch.tensor([0, table.keys.index("03.png")]))


def test_images_that_are_missing_are_refused_before_anything_is_read(table, tmp_path):
    half = write_pictures(tmp_path / "photos", 4)
    with pytest.raises(ImageError, match=r"source: 6 of 14 images of these targets are not in it, such as '04.png'"):
        rows_of_table(table, half)


def test_an_unknown_target_is_refused(photos, table):
    with pytest.raises(PullbackError, match="target: expected one of importance, block-norm, got 'gradient'"):
        StoredRows(table, reader_of(table, photos)).examples("gradient")


# ---- images without targets


def test_broken_files_are_left_out_of_training_images(photos):
    wanted = small_probe().pixel_format(SIZE)
    assert [row.item.key for row in readable_rows(photos, wanted)] == [f"{number:02d}.png" for number in range(7)]
    assert [row.item.key for row in readable_rows(photos, wanted, limit=4)] == ["00.png", "01.png", "02.png"]


def test_files_that_are_left_out_are_named_in_the_log(photos, caplog):
    readable_rows(photos, PixelFormat.of(28))
    assert "left out 1 of 8 images: 02-broken.png: not a readable image" in caplog.text


def test_a_source_of_broken_files_is_an_error(tmp_path):
    (tmp_path / "no.png").write_bytes(b"nothing")
    with pytest.raises(ImageError, match="source: expected at least one readable image, got none"):
        readable_rows(tmp_path, PixelFormat.of(28))


# ---- held in memory


def test_kept_features_are_computed_once_and_within_float16(photos, table):
    read, calls, seen = reader_of(table, photos), [], []

    def counted(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return read(rows)

    held = kept(counted, len(table), on_progress=seen.append)
    rows = torch.tensor([3, 0, 13, 3])
    torch.testing.assert_close(held(rows), read(rows), rtol=5e-4, atol=1e-7)
    assert held(rows).dtype == torch.float64 and type(held(rows)) is torch.Tensor
    assert sum(calls) == sum(seen) == len(table)


def test_features_beyond_float16_cannot_be_kept():
    with pytest.raises(PullbackError, match=r"features: some do not fit into float16. Recompute them in every step"):
        kept(lambda rows: 1e5 * torch.ones(len(rows), 2, 3), 5)


def test_nothing_cannot_be_kept():
    with pytest.raises(PullbackError, match="count: expected at least one row, got 0"):
        kept(lambda rows: torch.ones(len(rows), 2, 3), 0)


# ---- stores


def test_a_store_gives_examples_of_both_targets(store, photos, table):
    rows = StoredRows.of(small_probe(), store, keep_features=False)
    assert len(rows) == 14 and rows.prefix == 1
    both = [rows.examples(target) for target in ("importance", "block-norm")]
    torch.testing.assert_close(both[0].target, table.importance)
    torch.testing.assert_close(both[1].target, table.block_energy.sqrt())
    expected = reader_of(table, photos)(torch.tensor([4]))
    for examples in both:
        assert examples.prefix == 1 and torch.equal(examples.features(torch.tensor([4])), expected)


def test_selected_rows_of_a_store_keep_features_and_targets_together(store):
    rows = StoredRows.of(small_probe(), store)
    some = rows.select([8, 1, 5])
    assert torch.equal(some.examples().target, rows.examples().target[[8, 1, 5]])
    assert torch.equal(some.features(torch.tensor([2, 0])), rows.features(torch.tensor([5, 8])))
    assert torch.equal(some.select([1]).features(torch.tensor([0])), rows.features(torch.tensor([1])))


def test_pixels_are_made_as_the_store_says_whatever_the_model_says_now(store, photos):
    probe = small_probe()
    wanted = replace(probe.backbone.preprocessing, mean=(0.1, 0.1, 0.1), interpolation="nearest")
    changed = replace(probe, backbone=replace(probe.backbone, preprocessing=wanted))
    rows = [StoredRows.of(p, store, keep_features=False).features(torch.arange(3)) for p in (probe, changed)]
    assert torch.equal(*rows)


def test_images_may_lie_somewhere_else_by_now(store, photos, tmp_path):
    copy = shutil.copytree(photos, tmp_path / "moved")
    rows = [StoredRows.of(small_probe(), store, images).features(torch.arange(14)) for images in (None, copy)]
    assert torch.equal(*rows)


def test_a_fingerprint_knows_rows_order_and_recipe_and_not_the_place(table):
    config = {"rank": 3, "source": "here", "model": "a", "seed": 0}
    known = fingerprint(table, config)
    assert known == fingerprint(table, config | {"source": "there", "model": "b"})
    assert known != fingerprint(table, config | {"seed": 1})
    assert known != fingerprint(table.select(range(13)), config)
    assert known != fingerprint(table.select([1, 0, *range(2, 14)]), config)


# ---- held out


def test_crops_of_an_image_are_held_out_together(table):
    train, held_out = split_by_image(table, 0.5)
    assert sorted(train + held_out) == list(range(14))
    keys = [{table.keys[row] for row in rows} for rows in (train, held_out)]
    assert not keys[0] & keys[1] and len(keys[0] | keys[1]) == 7


def test_an_image_stays_where_it_is_when_rows_are_added(table):
    def held_out(rows: TargetTable) -> set[str]:
        return {rows.keys[row] for row in split_by_image(rows, 0.5)[1]}

    everything = held_out(table)
    for count in (8, 12):
        some = table.select(range(count))
        assert held_out(some) == everything & set(some.keys)


def test_about_the_share_is_held_out():
    import hashlib

    digests = tuple(hashlib.sha256(str(number).encode()).hexdigest() for number in range(2000))
    empty = torch.zeros(2000, 1)
    many = TargetTable(digests, digests, (0,) * 2000, (None,) * 2000, *(8 * [empty]))
    assert len(split_by_image(many, 0.1)[1]) == pytest.approx(200, abs=40)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 3])
def test_a_share_outside_0_to_1_is_refused(table, share):
    with pytest.raises(PullbackError, match="held_out: expected a share between 0 and 1, or a store of its own, got"):
        split_by_image(table, share)


def test_too_few_rows_to_hold_any_out_is_an_error(table):
    with pytest.raises(
        PullbackError, match=r"held_out: 2 rows cannot be split by a share of 0.5: .* (none was|all were)\. Give more"
    ):
        split_by_image(table.select([0, 1]), 0.5)
