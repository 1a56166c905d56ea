"""Published rules against a literal version of their papers, token by token, and against the authors' outputs."""

import math

import pytest
import torch
import torch.nn.functional as F

import pullback as pb
from helpers.families import SMALL_MODELS, images_for, model_of
from pullback.backbones import load_backbone
from pullback.backbones.outputs import class_alone
from pullback.errors import ModelError, PullbackError, ShapeError
from pullback.pruning.operations import operations
from pullback.pruning.plan import BlockPlan, published
from pullback.registry import BACKBONES

IMAGES = [name for name, small in SMALL_MODELS.items() if BACKBONES[small.family].assemble and "siglip2" not in name]
KNOBS = {"tome": {"r": 2}, "pitome": {"keep": 0.7}, "evit": {"keep": 0.6}}


def literal(name, knob, backbone, image):
    """Return the tokens after the last block of one image [1, 3, H, W], by loops over tokens."""
    x, sizes = backbone.embed(image)[0], None
    for layer, block in enumerate(backbone.blocks):
        sizes = torch.ones(len(x), dtype=x.dtype) if sizes is None else sizes
        log_sizes = sizes.log()[None] if name == "tome" else None
        half = block.attention(x[None], None, None, log_sizes)
        y, keys = half.tokens[0], half.keys[0].mean(0)
        if name == "tome":
            y, sizes = tome(y, keys, sizes, knob)
        elif name == "pitome":
            y, sizes = pitome(y, keys, sizes, knob, layer, backbone.depth)
        elif layer in published("evit", {"keep": knob}, depth=backbone.depth).stages:
            y = evit(y, half, knob)
            sizes = None
        x = block.after_attention(y[None])[0]
    return x


def tome(y, keys, sizes, r):
    first, second = list(range(0, len(y), 2)), list(range(1, len(y), 2))
    return merge(y, keys, sizes, first, second, min(r, (len(y) - 1) // 2), list(range(len(y))))


def merge(y, keys, sizes, first, second, r, order):
    proposals = []
    for a in first:
        if a == 0:
            continue
        similar = [F.cosine_similarity(keys[a], keys[b], dim=0) for b in second]
        best = max(range(len(second)), key=lambda place: similar[place])
        proposals.append((similar[best].item(), a, second[best]))
    proposals.sort(reverse=True)
    total, weight = {b: y[b] * sizes[b] for b in range(len(y))}, {b: sizes[b] for b in range(len(y))}
    for _, a, b in proposals[:r]:
        total[b], weight[b] = total[b] + total[a], weight[b] + weight[a]
    gone = {a for _, a, _ in proposals[:r]}
    left = [t for t in order if t not in gone and t not in second] + [b for b in second]
    return torch.stack([total[t] / weight[t] for t in left]), torch.stack([weight[t] for t in left])


def pitome(y, keys, sizes, keep, layer, depth):
    count = len(y) - 1
    r = math.floor(count - count * keep)
    cosine = F.cosine_similarity(keys[1:, None], keys[None, 1:], dim=-1)
    energy = F.elu(cosine - (0.75 - 0.75 * layer / depth)).mean(1)
    order = (energy.argsort(descending=True) + 1).tolist()
    chosen = order if layer < math.ceil(depth / 2) else order[: 2 * r]
    others = [t for t in range(len(y)) if t not in chosen]
    return merge(y, keys, sizes, chosen[::2], chosen[1::2], r, others + chosen)


def evit(y, half, keep):
    q, k = half.queries[0, :, 0], half.keys[0]
    attention = torch.stack([(k[h] @ q[h] / q.shape[-1] ** 0.5).softmax(0) for h in range(len(q))]).mean(0)
    stays = math.ceil(keep * (len(y) - 1))
    order = (attention[1:].argsort(descending=True) + 1).tolist()
    kept = [0, *sorted(order[:stays])]
    fused = sum(attention[t] * y[t] for t in order[stays:])
    return torch.cat([y[kept], fused[None]])


@pytest.mark.parametrize("name", KNOBS)
@pytest.mark.parametrize("family", ["dinov2", "clip", "vit"])
def test_the_rule_is_that_of_its_paper(name, family):
    model, images = model_of(family).double(), images_for(family, (3, 3)).double()
    (knob,) = KNOBS[name].values()
    pruned = pb.prune(model, preset=name, **KNOBS[name])
    backbone = pruned.backbone
    found = pruned.run(images, [backbone.depth - 1]).taps[0]
    for number in range(len(images)):
        expected = literal(name, knob, backbone, images[number : number + 1])
        assert found[number].shape == expected.shape
        # the order of tokens means nothing, but that of the class token
        torch.testing.assert_close(found[number, 0], expected[0])
        torch.testing.assert_close(found[number].sum(0), expected.sum(0))


@pytest.mark.weights("models/dinov2-small", "data/imagenet_val/diag", "specs/rivals_parity_visible.safetensors")
@pytest.mark.parametrize(
    ("key", "knobs"),
    [
        ("unpruned", {"preset": "none"}),
        ("tome_r8", {"preset": "tome", "r": 8}),
        ("tome_r16", {"preset": "tome", "r": 16}),
        ("tome_decreasing_r8", {"preset": "tome", "r": (8, -1)}),
        ("pitome_0.95", {"preset": "pitome", "keep": 0.95}),
        ("pitome_0.9", {"preset": "pitome", "keep": 0.9}),
    ],
)
def test_the_outputs_are_those_of_the_authors_code(key, knobs, shared):
    from safetensors.torch import load_file

    expected = load_file(shared / "specs/rivals_parity_visible.safetensors")[key].double()
    # In float32 two proposals of one image are as good as equal, and rounding decides; in float64 they are not.
    probe = pb.load_probe(str(shared / "models/dinov2-small"), "cls", device="cpu")
    files = [str(file) for file in sorted((shared / "data/imagenet_val/diag").iterdir())[:8]]
    images = pb.load_images(files, probe, size=224).double()
    with torch.no_grad():
        found = pb.prune(probe.backbone.model.double(), **knobs)(images).pooler_output
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < 1e-4


def test_schedules_of_tome():
    def merged(r, depth=12):
        return published("tome", {"r": r}, depth=depth).merged

    assert merged(8) == (8,) * 12
    assert merged((8, -1)) == (16, 14, 13, 11, 10, 8, 7, 5, 4, 2, 1, 0)
    assert merged((8, 0)) == (8,) * 12
    assert merged((8, 1))[0] == 0 and merged((8, 1))[-1] == 16
    assert merged([3, 2], 4) == (3, 2, 0, 0)


def test_tome_merges_at_most_half_of_what_is_left():
    model, images = model_of("dinov2"), images_for("dinov2", (3, 3))
    records = pb.prune(model, preset="tome", r=100).with_record(images)[1].records
    counts = [10]
    for record in records:
        assert record.removed.shape[1] == (counts[-1] - 1) // 2
        counts.append(record.kept.shape[1])


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("preset", KNOBS)
def test_every_family_runs_every_published_rule(name, preset):
    model, images = model_of(name), images_for(name, (3, 3))
    if preset == "evit" and load_backbone(model).prefix == 0:
        with pytest.raises(ModelError, match="no class token"):
            pb.prune(model, preset=preset, **KNOBS[preset])
        return
    pruned = pb.prune(model, preset=preset, **KNOBS[preset])
    with torch.no_grad():
        full, found = pruned.model(images, **options_of(name)), pruned.pruned(images)
    assert type(full) is type(found)
    assert all(record.removed.shape[1] > 0 for record in pruned.with_record(images)[1].records)


def options_of(name):
    from pullback.backbones.outputs import FIXED_SIZE

    return {"interpolate_pos_encoding": True} if SMALL_MODELS[name].family in FIXED_SIZE else {}


@pytest.mark.parametrize("preset", KNOBS)
def test_patch_tokens_come_back_as_copies_of_what_they_went_into(preset):
    model, images = model_of("dinov2"), images_for("dinov2", (3, 3))
    pruned = pb.prune(model, preset=preset, **KNOBS[preset], dense=True)
    with torch.no_grad():
        found, whole = pruned(images).last_hidden_state, model(images).last_hidden_state
        few = pb.prune(model, preset=preset, **KNOBS[preset])(images).last_hidden_state
    assert found.shape == whole.shape and few.shape[1] < whole.shape[1]
    for full, left in zip(found, few, strict=True):
        nearest = torch.cdist(full.double(), left.double()).min(1).values
        assert nearest.max() < 1e-5


# The class row


@pytest.mark.parametrize("name", IMAGES)
def test_the_class_row_is_the_full_computation_or_is_refused(name):
    model, images = model_of(name).double(), images_for(name, (3, 3)).double()
    if not class_alone(load_backbone(model)):
        with pytest.raises(PullbackError, match="output:"):
            pb.prune(model, preset="none", output="cls")
        return
    for arguments in (
        {"preset": "none"},
        {"preset": "tome", "r": 1},
        {"preset": "evit", "keep": 0.6},
        {"score": "norm", "ratio": 0.4, "stages": [0]},
    ):
        rows = pb.prune(model, **arguments, output="cls")
        with torch.no_grad():
            row, all_rows = rows.pruned(images), pb.prune(model, **arguments).pruned(images)
        read = [key for key in ("pooler_output", "image_embeds", "logits") if getattr(all_rows, key, None) is not None]
        if isinstance(row, torch.Tensor):
            torch.testing.assert_close(row, all_rows, rtol=1e-6, atol=1e-6)
            continue
        assert read
        for key in read:
            torch.testing.assert_close(getattr(row, key), getattr(all_rows, key), rtol=1e-6, atol=1e-6)
        assert getattr(row, "last_hidden_state", None) is None


def test_the_class_row_is_refused_where_patch_tokens_come_back():
    with pytest.raises(PullbackError, match="brings all patch tokens back"):
        pb.prune(model_of("dinov2"), preset="tome", r=1, dense=True, output="cls")
    with pytest.raises(PullbackError, match='"model" or "cls"'):
        pb.prune(model_of("dinov2"), preset="tome", r=1, output="class")


# A smaller picture


def test_a_smaller_picture_is_the_model_on_the_shrunk_picture():
    model, images = model_of("dinov2"), images_for("dinov2", (3, 3))
    patch = load_backbone(model).patch_size
    small = F.interpolate(images, size=(2 * patch, 2 * patch), mode="bicubic", antialias=True)
    with torch.no_grad():
        found, expected = pb.prune(model, preset="resize", size=2 * patch)(images), model(small)
    torch.testing.assert_close(found.pooler_output, expected.pooler_output)
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state)


def test_a_smaller_picture_goes_with_stages_and_with_rules():
    model, images = model_of("dinov2"), images_for("dinov2", (3, 3))
    patch = load_backbone(model).patch_size
    for arguments in ({"score": "norm", "ratio": 0.5, "stages": [0]}, {"preset": "tome", "r": 1}):
        both = pb.prune(model, **arguments, size=2 * patch)
        alone = operations(pb.prune(model, **arguments), images)
        assert operations(both, images) < min(
            alone, operations(pb.prune(model, preset="resize", size=2 * patch), images)
        )


@pytest.mark.parametrize("name", ["depth-raw-hooks", "tiny-scenes"])
def test_maps_and_tokens_are_enlarged_to_the_picture(name):
    model, images = model_of(name), images_for(name, (3, 3))
    patch = load_backbone(model).patch_size
    with torch.no_grad():
        found = pb.prune(model, preset="resize", size=2 * patch)(images)
    assert found.predicted_depth.shape == model(images).predicted_depth.shape
    plain, pictures = model_of("dinov2"), images_for("dinov2", (3, 3))
    dense = pb.prune(plain, preset="resize", size=2 * load_backbone(plain).patch_size, dense=True)
    assert dense(pictures).last_hidden_state.shape == plain(pictures).last_hidden_state.shape


def test_wide_pictures_keep_their_shape():
    from pullback.pruning.resized import shrunk

    assert shrunk(torch.zeros(1, 3, 28, 56), 14, 14).shape == (1, 3, 14, 28)


# Operations


def test_operations_are_those_of_the_formula():
    model, images = model_of("dinov2"), images_for("dinov2", (3, 3))
    backbone = load_backbone(model)
    width, ratio = backbone.dim, backbone.blocks[0].mlp.up.weight.shape[0] / backbone.dim

    def blocks(before, after, rows=None):
        """Operations of one block, with ``rows`` tokens of which the output is computed."""
        read = before if rows is None else rows
        attention = 4 * read * width**2 + 4 * before * width**2 + 4 * read * before * width
        return attention + 4 * ratio * after * width**2

    count, depth = 10, backbone.depth
    whole = depth * blocks(count, count)
    assert operations(pb.prune(model, preset="none", output="cls"), images) == pytest.approx(
        ((depth - 1) * blocks(count, count) + blocks(count, 1, 1)) / whole
    )
    tome = pb.prune(model, preset="tome", r=2)
    left = [count - 2 * done for done in range(depth + 1)]
    expected = sum(blocks(left[block], left[block + 1]) for block in range(depth)) / whole
    assert expected < operations(tome, images) < 1.1 * expected  # and the matching


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "tome"}, "r: preset 'tome' needs it"),
        ({"preset": "tome", "r": 2.5}, "r: expected how many"),
        ({"preset": "tome", "r": -1}, "r: expected how many"),
        ({"preset": "tome", "r": (8, 3)}, "inflection"),
        ({"preset": "tome", "r": [1] * 40}, "r: expected how many"),
        ({"preset": "tome", "r": 8, "keep": 0.9}, "keep: preset 'tome' does not take it"),
        ({"preset": "tome", "r": 8, "stages": [2]}, "stages: preset 'tome' does not take it"),
        ({"preset": "tome", "r": 8, "score": "norm"}, "score: preset 'tome' has its own"),
        ({"preset": "pitome"}, "keep: preset 'pitome' needs it"),
        ({"preset": "pitome", "keep": 0}, "keep: expected a share"),
        ({"preset": "evit", "keep": 1.5}, "keep: expected a share"),
        ({"preset": "evit", "keep": "much"}, "keep: expected a share"),
        ({"preset": "resize"}, "size: expected the picture's shorter side"),
        ({"preset": "resize", "size": 15}, "size: expected a multiple of the patch size"),
        ({"preset": "resize", "size": -14}, "size: expected the picture's shorter side"),
        ({"preset": "best", "ratio": 0.5, "stages": [0]}, "score: preset 'best' needs one"),
        ({"score": "norm", "stages": [0]}, "ratio: preset 'best' needs it"),
        ({"score": "norm", "ratio": 0.5}, "stages: preset 'best' needs it"),
        ({"score": "norm", "ratio": 0.5, "stages": [0], "r": 8}, "r: preset 'best' does not take it"),
    ],
)
def test_bad_knobs_are_named(arguments, message):
    with pytest.raises(PullbackError, match=message):
        pb.prune(model_of("dinov2"), **arguments)


def test_a_picture_smaller_than_the_plan_wants_is_refused():
    model, images = model_of("dinov2"), images_for("dinov2", (2, 2))
    patch = load_backbone(model).patch_size
    with pytest.raises(ShapeError, match="shrinks pictures to"):
        pb.prune(model, preset="resize", size=3 * patch)(images)


def test_a_published_rule_is_saved_and_read(tmp_path):
    model, images = model_of("dinov2"), images_for("dinov2", (3, 3))
    pruned = pb.prune(model, preset="tome", r=[2, 1], size=2 * load_backbone(model).patch_size, output="cls")
    again = pb.PrunedModel.from_pretrained(pruned.save_pretrained(tmp_path))
    assert again.plan == pruned.plan and isinstance(again.plan, BlockPlan)
    with torch.no_grad():
        torch.testing.assert_close(again(images).pooler_output, pruned(images).pooler_output)
