"""What a decoder is known by in files: code and parameters, the same in every process, whatever it is called."""

import functools
import logging
import runpy
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pullback as pb
from helpers.families import model_of
from pullback.decoders import DISTANCES
from pullback.decoders.identity import identity_of
from pullback.errors import DecoderError

SCALE = torch.tensor([2.0, 3.0])
LOCK = threading.Lock()


def decoder_identity(choice, **options) -> str:
    probe = pb.load_probe(model_of("dinov2"), choice, 1, **options)
    return probe.identity["decoder_identity"]


def linear(seed: int = 0, **options) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(24, 3, **options).double().eval()


def convolution(seed: int = 0, stride: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(24, 2, 1, stride=stride), nn.BatchNorm2d(2)).double().eval()


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.eval()

    def forward(self, tokens):
        return self.scaled(tokens[:, 0])

    def scaled(self, tokens):
        return self.factor * tokens

    def log(self):  # no part of the output, so what it uses does not matter
        return LOCK


class ScaledBefore(Scaled):
    def scaled(self, tokens):
        return tokens * self.factor + 1


@dataclass(frozen=True)
class Power:
    exponent: int

    def __call__(self, tokens):
        return tokens[:, 0] ** self.exponent


def power_of(exponent: int):
    def decode(tokens):
        return tokens[:, 0] ** exponent

    return decode


def with_default(tokens, exponent=2):
    return tokens[:, 0] ** exponent


def uses_a_global(tokens):
    return tokens[:, 0, :2] * SCALE


def helper(tokens):
    return tokens + 1


def uses_a_helper(tokens):
    return helper(tokens)[:, 0]


def is_locked(tokens):
    with LOCK:
        return tokens[:, 0]


SAME = {
    "a lambda": lambda: lambda tokens: tokens[:, 0] * 2,
    "a closure": lambda: power_of(3),
    "a partial": lambda: functools.partial(with_default, exponent=3),
    "a module": linear,
    "a module with code of its own": lambda: Scaled(2.0),
    "a head on the patch grid": lambda: pb.PatchGrid(convolution()),
    "a callable object": lambda: Power(2),
    "a bound method": lambda: Scaled(2.0).scaled,
    "a function under no_grad": lambda: torch.no_grad()(power_of(2)),
    "a Decoder": lambda: pb.Decoder("own", (2,), lambda taps, layout: taps[0][:, 0]),
    "a function of torch": lambda: torch.sin,
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME.keys())
def test_the_same_thing_made_twice_has_one_identity(make):
    assert decoder_identity(make()) == decoder_identity(make())


OTHER = {
    "code": (lambda tokens: tokens[:, 0], lambda tokens: tokens[:, 1]),
    "an operation": (lambda tokens: tokens[:, 0].sin(), lambda tokens: tokens[:, 0].cos()),
    "a function that is called": (lambda tokens: F.relu(tokens[:, 0]), lambda tokens: F.gelu(tokens[:, 0])),
    "what a closure holds": (power_of(2), power_of(3)),
    "a default": (with_default, lambda tokens, exponent=3: tokens[:, 0] ** exponent),
    "an argument of a partial": (
        functools.partial(with_default, exponent=2),
        functools.partial(with_default, exponent=3),
    ),
    "parameters": (linear(0), linear(1)),
    "parameters of a patch head": (pb.PatchGrid(convolution(0)), pb.PatchGrid(convolution(1))),
    "settings of a layer": (pb.PatchGrid(convolution()), pb.PatchGrid(convolution(stride=2))),
    "an attribute": (Scaled(2.0), Scaled(3.0)),
    "a method": (Scaled(2.0), ScaledBefore(2.0)),
    "a field": (Power(2), Power(3)),
    "layers": tuple(pb.Decoder("own", (layer,), lambda taps, layout: taps[0][:, 0]) for layer in (1, 2)),
    "the norm": tuple(pb.Decoder("own", (2,), lambda taps, layout: taps[0], normed=normed) for normed in (True, False)),
    "how a module is read": (lambda tokens: tokens.mean(1), pb.PatchGrid(lambda tokens: tokens.mean(1))),
    "a given version": tuple(pb.Decoder("own", (2,), with_default, version=version) for version in "12"),
}


@pytest.mark.parametrize(("one", "other"), OTHER.values(), ids=OTHER.keys())
def test_another_thing_has_another_identity(one, other):
    assert decoder_identity(one) != decoder_identity(other)


def test_a_buffer_counts():
    moved = convolution()
    moved[1].running_mean += 1
    assert decoder_identity(pb.PatchGrid(convolution())) != decoder_identity(pb.PatchGrid(moved))


def test_globals_and_helpers_of_the_same_module_count(monkeypatch):
    before = decoder_identity(uses_a_global), decoder_identity(uses_a_helper)
    monkeypatch.setitem(globals(), "SCALE", torch.tensor([2.0, 3.5]))
    monkeypatch.setitem(globals(), "helper", lambda tokens: tokens + 2)
    after = decoder_identity(uses_a_global), decoder_identity(uses_a_helper)
    assert before[0] != after[0] and before[1] != after[1]
    # only the parameters differ in the first, only the code in the second
    assert before[0].split(", ")[1] == after[0].split(", ")[1] and "parameters" not in before[1]


def test_what_differs_can_be_read_off():
    one, other = decoder_identity(linear(0)), decoder_identity(linear(1))
    assert one.split(", ")[:2] == other.split(", ")[:2] and "parameters" in one


def test_the_weights_of_the_model_are_no_parameters_of_the_decoder():
    """They have a hash of their own in every file."""
    probe = pb.load_probe(model_of("depth-v2"), "depth", 1)
    assert "parameters" not in probe.identity["decoder_identity"]
    model = model_of("dinov2")
    inside = pb.load_probe(model, lambda tokens: model.layernorm(tokens[:, 0]), 1)
    assert "parameters" not in inside.identity["decoder_identity"]


def test_decoders_by_name_are_known_by_name_and_version():
    assert decoder_identity("cls") == "layers 2, version pullback-1" == decoder_identity("mean")
    own = pb.Decoder("cls", (2,), lambda taps, layout: taps[0][:, 0])
    assert decoder_identity(own) != decoder_identity("cls")


def test_a_registered_decoder_is_known_by_its_code_unless_its_entry_has_a_version(monkeypatch):
    from pullback import registry

    def registered(version: str = "", factor: int = 1) -> str:
        def build(backbone):
            return pb.Decoder("mine", (backbone.depth - 1,), lambda taps, layout: factor * taps[0][:, 0])

        monkeypatch.setattr(registry, "DECODERS", list(registry.DECODERS))
        pb.register_decoder(pb.DecoderEntry("mine", build, help="mine", version=version))
        return decoder_identity("mine")

    assert registered(factor=1) == registered(factor=1) != registered(factor=2)
    assert registered("7", factor=1) == registered("7", factor=2) == "layers 2, version 7"


def test_a_saliency_head_counts_with_its_parameters():
    from pullback.decoders.dense import SaliencyHead, on_patch_grid

    def known(seed: int) -> str:
        torch.manual_seed(seed)
        head = SaliencyHead(24, (4, 4, 4)).double().eval()
        probe = pb.load_probe(model_of("dinov2"), "cls", 1)
        decoder = replace(on_patch_grid(probe.backbone, pb.PatchGrid(head, "saliency")), version="pullback-1")
        return decoder.identity(probe.backbone.model)

    assert known(0) == known(0) != known(1) and "version pullback-1, parameters" in known(0)


def test_a_version_takes_the_place_of_the_code_and_leaves_the_parameters():
    first, second = linear(0), linear(1)
    one, again, other = (
        decoder_identity(pb.Decoder("own", (2,), decode, version="3"))
        for decode in (
            lambda taps, layout: first(taps[0]),
            lambda taps, layout: first(taps[0]) * 1,
            lambda taps, layout: second(taps[0]),
        )
    )
    assert one == again != other and "version 3, parameters" in one


def test_a_version_may_stand_on_a_patch_grid_and_on_a_function():
    assert "version 4" in decoder_identity(pb.PatchGrid(is_locked, version="4"))

    def locked(tokens):
        return is_locked(tokens)

    locked.version = "5"
    assert "version 5" in decoder_identity(locked)


def test_what_cannot_be_hashed_is_refused_with_the_way_out():
    message = r"decoder: .*is_locked.* uses LOCK, a lock, .*version"
    with pytest.raises(DecoderError, match=message):
        decoder_identity(is_locked)
    stream = torch.Generator()
    with pytest.raises(DecoderError, match=r"uses stream, a Generator.*pb.Decoder\(\.\.\., version="):
        decoder_identity(lambda tokens: tokens + torch.rand(1, generator=stream))
    with pytest.raises(DecoderError, match=r"distance: .*version"):
        decoder_identity("cls", distance=is_locked)


def test_what_is_imported_inside_a_function_is_refused_with_the_way_out():
    def decode(tokens):
        from helpers.toys import anything  # its content may change while this code stays the same

        return anything(tokens)

    def ordinary(tokens):
        import torch.nn.functional as functional

        return functional.relu(tokens[:, 0])

    with pytest.raises(DecoderError, match=r"import helpers.toys inside a function.*by a version"):
        decoder_identity(decode)
    assert "code" in decoder_identity(ordinary)
    decode.version = "1"
    assert "version 1" in decoder_identity(decode)


def test_equal_tuples_count_by_value_not_by_object():
    def of(first, second):
        def decode(tokens, one=first, other=second):
            return tokens[:, 0]

        return identity_of(decode, argument="decoder")

    same = tuple([1, 2])
    assert of(same, same) == of(same, tuple([1, 2])) != of(same, (1, 3))


@pytest.mark.parametrize("version", ["", 3])
def test_a_version_is_a_text(version):
    with pytest.raises(DecoderError, match="version: expected a text such as '1'"):
        pb.Decoder("own", (2,), with_default, version=version)


def test_distances_and_output_metrics_are_known_likewise():
    def known(**options) -> dict:
        return pb.load_probe(model_of("dinov2"), "cls", 1, **options).identity

    plain = known()
    assert plain["distance_identity"] is None and plain["output_metric_identity"] is None
    assert known(distance="cosine")["distance_identity"] == "version pullback-1"
    assert set(DISTANCES) == {"cosine", "log", "silog"}
    sines = [known(distance=lambda y, k=k: torch.sin(k * y))["distance_identity"] for k in (1, 1, 2)]
    assert sines[0] == sines[1] != sines[2]
    factors = [known(output_metric=k * torch.eye(24))["output_metric_identity"] for k in (1, 1, 2)]
    assert factors[0] == factors[1] != factors[2]
    functions = [known(output_metric=lambda y, k=k: k * torch.eye(24))["output_metric_identity"] for k in (1, 1, 2)]
    assert functions[0] == functions[1] != functions[2]


def test_the_camera_metric_is_known_by_its_units_to_the_last_digit():
    units = [
        identity_of(pb.CameraMetric(translation_unit=unit), argument="output_metric") for unit in (1.0, 1.0 + 1e-9)
    ]
    assert units[0] != units[1] and "Python" not in units[0]


def test_a_compiled_module_is_the_module():
    class Compiled(nn.Module):  # as torch.compile returns it, without the seconds that its import takes
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._orig_mod = module
            self.something = threading.Lock()

        def forward(self, tokens):
            return self._orig_mod(tokens)

    assert decoder_identity(Compiled(linear()).eval()) == decoder_identity(linear())


def test_recursion_and_shared_parts_end():
    def countdown(tokens, times=2):
        return tokens[:, 0] if times == 0 else countdown(tokens, times - 1)

    assert decoder_identity(countdown) == decoder_identity(countdown)


SCRIPT = '''
import torch
{blank}
import pullback as pb
from pullback.decoders.identity import identity_of

readout = torch.arange(24.0, dtype=torch.float64)
table = {{"scale": 2.0, "names": {{"a", "b", "c", "d"}}}}

class Head(torch.nn.Module):
    """{words}"""
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(24, 2).double()
        with torch.no_grad():
            for value in self.parameters():
                value.fill_(0.5)
    def forward(self, x):
        return F.relu(self.lin(x[:, 0])) * table["scale"]

import torch.nn.functional as F

def decode(tokens):
    """{words}"""
    return tokens[:, 0] @ readout if "a" in {{"a", "b", "c"}} else tokens

for choice in (decode, Head().eval(), pb.PatchGrid(lambda x: x.mean((2, 3)))):
    print(identity_of(choice, argument="decoder"))
'''


def test_the_identity_is_the_same_in_another_process_from_another_file(tmp_path, capsys):
    """Other hash seeds, line numbers, docstrings and folders; the sets in it have another order."""

    def write(number: int, blank: str) -> str:
        (tmp_path / str(number)).mkdir()
        script = tmp_path / str(number) / f"script{number}.py"
        script.write_text(textwrap.dedent(SCRIPT.format(blank=blank, words=f"words {number}")))
        return str(script)

    runpy.run_path(write(0, ""), run_name="__main__")
    here = capsys.readouterr().out
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, write(1, "\n\n\n")]
    there = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert there.returncode == 0, there.stderr
    assert here == there.stdout and len(set(here.split("\n")[:3])) == 3


def test_a_logger_is_refused_or_known_but_never_an_address():
    logger = logging.getLogger("somewhere")
    try:
        first = decoder_identity(lambda tokens: (logger.debug("x"), tokens[:, 0])[1])
    except DecoderError as error:
        assert "0x" not in str(error)
    else:
        assert first == decoder_identity(lambda tokens: (logger.debug("x"), tokens[:, 0])[1])


def test_a_closure_over_the_backbone_is_known_wherever_the_model_lies(tmp_path):
    from helpers.families import save

    def known(folder) -> str:
        backbone = pb.load_backbone(folder, device="cpu")
        decoder = pb.Decoder("own", (2,), lambda taps, layout: backbone.norm(taps[0][:, 0]), normed=False)
        return decoder.identity(backbone.model)

    for name in ("here", "there"):
        save(model_of("dinov2"), tmp_path / name)
    assert known(tmp_path / "here") == known(tmp_path / "there")


def test_what_a_cached_property_has_computed_is_no_part_of_an_object():
    class Cached(Scaled):
        @functools.cached_property
        def doubled(self):
            return 2 * self.factor

        def forward(self, tokens):
            return tokens[:, 0] * self.doubled

    fresh, used = Cached(2.0), Cached(2.0)
    assert used.doubled == 4.0 and decoder_identity(fresh) == decoder_identity(used) != decoder_identity(Cached(3.0))
