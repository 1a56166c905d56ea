"""Decoders that mix the samples of a batch, or take what they cannot take, are refused before long work."""

import pytest
import torch
from torch import nn

import pullback as pb
from helpers.families import SMALL_MODELS, images_for, model_of
from helpers.toys import PlainProbe
from pullback.errors import DecoderError


class Normed(nn.Module):
    """Batch norm, which mixes samples in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24).double()

    def forward(self, tokens):
        return self.norm(tokens.mT)[:, :, 0]


def in_train_mode():
    inner = Normed().train()
    return lambda tokens: inner(tokens)  # a module itself is checked when it is passed


MIXING = {
    "a mean over the batch": lambda tokens: tokens[:, 0] - tokens[:, 0].mean(0),
    "a sum of all samples": lambda tokens: tokens[:, 0].sum(0, keepdim=True).expand(len(tokens), -1),
    "a softmax over the batch": lambda tokens: tokens[:, 0].softmax(0),
    "its number of samples": lambda tokens: tokens[:, 0] / len(tokens),
    "batch norm in train mode": in_train_mode(),
}
WORK = {
    "spectrum": lambda probe, images: pb.spectrum(probe, images, rank=2),
    "diagnose": lambda probe, images: pb.diagnose(probe, images, rank=2),
    "targets_of": lambda probe, images: pb.targets_of(probe, probe.features(images), rank=2),
}


@pytest.mark.parametrize("decoder", MIXING.values(), ids=MIXING.keys())
@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("images", [1, 2])
def test_mixing_is_noticed_also_with_one_image_and_at_the_last_layer(decoder, layer, images):
    probe = pb.load_probe(model_of("dinov2"), decoder, layer)
    message = r"decoder: what it gives for a sample must not depend on the other samples .* and for batch norm"
    with pytest.raises(DecoderError, match=message):
        pb.spectrum(probe, images_for("dinov2", (2, 3), batch=images), rank=2)


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_random_numbers_are_named_as_such_whoever_draws_them(generator):
    probe = pb.load_probe(model_of("dinov2"), lambda tokens: tokens[:, 0] * torch.rand(1, generator=generator), 1)
    with pytest.raises(DecoderError, match=r"decoder: it draws random numbers, as dropout does"):
        pb.spectrum(probe, images_for("dinov2", (2, 3), batch=1), rank=2)


@pytest.mark.parametrize("work", WORK.values(), ids=WORK.keys())
def test_all_long_work_begins_with_the_check(work):
    images = images_for("dinov2", (2, 3), batch=1)
    with pytest.raises(DecoderError, match="must not depend on the other samples"):
        work(pb.load_probe(model_of("dinov2"), MIXING["a mean over the batch"], 1), images)


@pytest.mark.parametrize("argument", ["distance", "output_metric"])
def test_so_do_distances_and_output_metrics(argument):
    def mixing(output):
        centred = output - output.mean(0)
        return centred if argument == "distance" else torch.diag_embed(1 + centred)

    probe = pb.load_probe(model_of("dinov2"), "cls", 1, **{argument: mixing})
    named = "decoder" if argument == "distance" else "output_metric"
    with pytest.raises(DecoderError, match=f"{named}: what it gives for a sample must not depend on the other samples"):
        pb.spectrum(probe, images_for("dinov2", (2, 3), batch=1), rank=2)


def test_one_row_for_the_whole_batch_is_noticed_with_one_image():
    probe = pb.load_probe(model_of("dinov2"), lambda tokens: tokens[:, 0].mean(0, keepdim=True), 1)
    with pytest.raises(DecoderError, match=r"decoder: expected an output \[2, 24\] for two samples, got \[1, 24\]"):
        pb.spectrum(probe, images_for("dinov2", (2, 3), batch=1), rank=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["dinov2", "dinov3", "siglip", "depth-v2"])
def test_round_off_is_no_mixing(name, dtype):
    from copy import deepcopy

    from pullback.geometry.independence import check_independence

    decoders = [known for known in SMALL_MODELS[name].references if known != "depth-3x4"]
    for decoder in decoders:
        for layer in (0, 2):
            probe = pb.load_probe(deepcopy(model_of(name)).to(dtype), decoder, layer)
            check_independence(probe, probe.features(images_for(name, (2, 3)).to(dtype)))


def test_the_check_is_made_once_for_each_probe():
    calls = []

    def count(features):
        calls.append(len(features))
        return features.flatten(1)[:, :3] ** 3

    features = torch.randn(3, 5, 4, dtype=torch.float64)
    probe = PlainProbe(count)
    pb.spectrum(probe, features, rank=2)
    first = len(calls)
    pb.spectrum(probe, features, rank=2)
    assert calls[:2] == [1, 2] and len(calls) - first == first - 2


def test_the_check_uses_no_random_numbers_of_the_user():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    pb.spectrum(pb.load_probe(model_of("dinov2"), "cls", 1), images_for("dinov2", (2, 3)), rank=2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("distance", ["log", "silog"])
def test_the_logarithm_of_signed_outputs_is_refused(distance):
    images = images_for("dinov2", (2, 3))
    probe = pb.load_probe(model_of("dinov2"), "cls", 1, distance=distance)
    message = rf"distance: '{distance}' takes the logarithm .* none below 0, but decoder 'cls' gives -\d.*cosine"
    with pytest.raises(DecoderError, match=message):
        pb.spectrum(probe, images, rank=2)
    with pytest.raises(DecoderError, match="distance: "):
        pb.JacobianOperator(probe, probe.features(images))


@pytest.mark.parametrize("after_norm", [True, False])
def test_also_at_the_inputs_of_a_decoder(after_norm):
    model = model_of("depth-v2")
    signed = pb.Decoder("signed", (0, 2), lambda taps, layout: taps[0][:, 0] - taps[1][:, 1])
    probe = pb.multi_layer_probe(model, signed, distance="log", after_norm=after_norm)
    with pytest.raises(DecoderError, match="distance: 'log' takes the logarithm"):
        pb.spectrum(probe, images_for("depth-v2", (2, 3)), rank=2)


def test_a_few_negative_pixels_of_one_image_are_enough():
    def depth(tokens):
        return tokens[:, 0].exp() - torch.where(tokens[:, :1, 0] > shut, 0.0, 5.0)

    images = images_for("dinov2", (2, 3))
    shut = float("-inf")
    probe = pb.load_probe(model_of("dinov2"), depth, 1, distance="silog")
    features = probe.features(images)
    pb.JacobianOperator(probe, features)
    tokens = probe.backbone.norm(probe.backbone.run(features, 2, 3))
    shut = float(tokens[:, 0, 0].mean())  # between the two images
    with pytest.raises(DecoderError, match="expected none below 0"):
        pb.JacobianOperator(probe, features)


def test_zeros_of_a_relu_and_what_is_nearer_to_zero_than_the_floor_pass():
    def depth(tokens):
        head = torch.relu(tokens[:, 0]) + 1.0
        return torch.cat([head, torch.zeros_like(head), -1e-9 * head], 1)

    probe = pb.load_probe(model_of("dinov2"), depth, 1, distance="log")
    pb.spectrum(probe, images_for("dinov2", (2, 3)), rank=2)


@pytest.mark.parametrize(("decoder", "fits"), [("depth-43x3", False), ("depth-3x43", False), ("depth-42x42", True)])
def test_more_cells_than_pixels_are_refused(decoder, fits):
    probe, images = pb.load_probe(model_of("depth-v2"), decoder, 1), images_for("depth-v2", (3, 3))
    features = probe.features(images)
    if fits:
        assert probe(features).shape[1:] == (42, 42)
        return
    with pytest.raises(DecoderError, match=f"decoder: '{decoder}' averages .* at most as many as its 42x42 pixels"):
        pb.spectrum(probe, images, rank=2)
