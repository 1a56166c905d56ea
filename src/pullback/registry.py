"""Everything that can be chosen by name: backbones, decoders, scores. Plain data, so that listing it needs no torch.

An entry says where its code is as "package.module:name"; the code is imported when the entry is used. Command-line
help, `pullback ls`, the tests and the documentation are generated from these tables. Packages of others add to them
through the entry-point group `pullback`: a function without arguments that calls `register_backbone`,
`register_decoder` or `register_score`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pullback.checks import of_kind
from pullback.errors import PullbackError

Code = str | Callable[..., Any]
"""Code, or where it is: "package.module:name"."""
GROUP = "pullback"
OWN_VERSION = "pullback-1"
"""What decoders and task distances of the package are known by in files, unless they say otherwise."""
NEEDS = ("", "head", "spn", "probe")
"""What a score may need besides the tokens."""


@dataclass(frozen=True)
class BackboneEntry:
    """A family of models.

    ``model_types``: names in config.json. ``adapt``: (module, name) -> a backbone (`backbones.AnyBackbone`).
    ``decoders``: names of the decoders that fit, for `pullback ls`; others are not refused because of it. ``example``:
    a model to try, for `pullback ls`. ``loader``: transformers' class for checkpoints that we do not read ourselves.
    ``load``: (name, device, dtype) -> module, for families that transformers does not have; ``name`` is the folder or
    hub id as the user wrote it, and the module is frozen and put into evaluation mode afterwards. ``names``: a regular
    expression of files and hub ids that belong to this family although no config.json says so. ``may_lack``: parameters
    that published checkpoints leave out and that no decoder reads unless they are there. ``views``: samples are several
    views of a scene, not single images. ``assemble``: (backbone, `backbones.Remaining`) -> what the model itself
    returns, made of the tokens that a pruned run leaves; without it `prune` refuses the family. ``recognise``: (module)
    -> bool, for modules of this family that have no config.model_type.
    """

    name: str
    model_types: tuple[str, ...]
    adapt: Code
    decoders: tuple[str, ...]
    example: str
    loader: str = "AutoModel"
    load: Code | None = None
    names: str = ""
    may_lack: tuple[str, ...] = ()
    views: bool = False
    assemble: Code | None = None
    recognise: Code | None = None

    def __post_init__(self) -> None:
        for field in ("model_types", "decoders", "may_lack"):
            _check_names(self.name, field, getattr(self, field))
        _check_pattern(self.name, "names", self.names)


@dataclass(frozen=True)
class DecoderEntry:
    """A decoder. ``build``: (backbone, *groups of ``pattern``) -> `Decoder`.

    ``pattern``: a regular expression for names with numbers in them, such as depth-8x8; by default the name itself.
    ``family``: the one backbone family that it belongs to, before the decoders of the same name for all; None: every
    family of single images. ``options``: arguments of `load_probe` that ``build`` takes by keyword, such as
    pose_derivative. ``version``: files know the decoder by it, in place of a hash of its code (`Decoder.version`), and
    it has to change whenever the output does.
    """

    name: str
    build: Code
    help: str
    pattern: str = ""
    family: str | None = None
    options: tuple[str, ...] = ()
    version: str = ""

    @property
    def known_version(self) -> str | None:
        """The version that files know it by. Those of the package have one, so that they are the same in every release
        that computes the same; of others None: by their code."""
        own = isinstance(self.build, str) and self.build.startswith(f"{GROUP}.")
        return self.version or (OWN_VERSION if own else None)

    def __post_init__(self) -> None:
        _check_names(self.name, "options", self.options)
        _check_pattern(self.name, "pattern", self.pattern)

    def match(self, choice: str) -> re.Match[str] | None:
        return re.fullmatch(self.pattern or re.escape(self.name), choice)


@dataclass(frozen=True)
class ScoreEntry:
    """A score per token. ``score``: (tokens [B, N, D], context) -> [B, N], not negative, the lowest are removed first.

    ``needs``: what it takes besides the tokens. Scores that need nothing work by name everywhere. Of a score that needs
    a "head", an "spn" or a "probe", ``score`` is a function that makes the score of such a network, or of a `ProbeMap`.
    """

    name: str
    score: Code
    help: str
    needs: str = ""

    def __post_init__(self) -> None:
        if self.needs not in NEEDS:
            raise PullbackError(
                f"registry: {self.name!r}: needs: expected one of {', '.join(map(repr, NEEDS))}, got {self.needs!r}."
            )


def _check_names(entry: str, field: str, names: object) -> None:
    if isinstance(names, str):  # whose letters would be taken for names
        raise PullbackError(f"registry: {entry!r}: {field}: expected a tuple of names, ({names!r},), got {names!r}.")


def _check_pattern(entry: str, field: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise PullbackError(
            f"registry: {entry!r}: {field}: expected a regular expression, got {pattern!r} ({error})."
        ) from None


@dataclass(frozen=True)
class PresetEntry:
    """A named pruning plan (`pullback.pruning.plan.preset`). ``score``: the one that it is defined with, if any.

    ``knob``: of a rule that runs as its authors published it, the argument of `pb.prune` that says how much it removes;
    such a rule takes no score, ratio or stages.
    """

    name: str
    help: str
    score: str = ""
    knob: str = ""


_FAMILIES, _OUTPUTS = "pullback.backbones.families", "pullback.backbones.outputs"
BACKBONES: dict[str, BackboneEntry] = {
    entry.name: entry
    for entry in (
        BackboneEntry(
            "dinov2",
            ("dinov2",),
            f"{_FAMILIES}:dinov2",
            ("cls", "mean", "logits", "logit-K", "saliency", "depth", "depth-GxG"),
            "facebook/dinov2-base",
            may_lack=("mask_token",),
            assemble=f"{_OUTPUTS}:dinov2",
        ),
        BackboneEntry(
            "dinov2-registers",
            ("dinov2_with_registers",),
            f"{_FAMILIES}:dinov2_registers",
            ("cls", "mean", "logits", "logit-K"),
            "facebook/dinov2-with-registers-base",
            may_lack=("mask_token",),
            assemble=f"{_OUTPUTS}:dinov2",
        ),
        BackboneEntry(
            "dinov3",
            ("dinov3_vit",),
            f"{_FAMILIES}:dinov3",
            ("cls", "mean"),
            "facebook/dinov3-vitb16-pretrain-lvd1689m",
            may_lack=("mask_token",),
            assemble=f"{_OUTPUTS}:dinov2",
        ),
        BackboneEntry(
            "clip",
            ("clip", "clip_vision_model"),
            f"{_FAMILIES}:clip",
            ("cls", "projection", "mean", "logits", "logit-K"),
            "openai/clip-vit-base-patch16",
            loader="CLIPVisionModelWithProjection",
            may_lack=("visual_projection",),
            assemble=f"{_OUTPUTS}:clip",
        ),
        BackboneEntry(
            "siglip",
            ("siglip", "siglip_vision_model"),
            f"{_FAMILIES}:siglip",
            ("pool", "mean", "logits", "logit-K"),
            "google/siglip-base-patch16-224",
            loader="SiglipVisionModel",
            assemble=f"{_OUTPUTS}:siglip",
        ),
        BackboneEntry(
            "siglip2",
            ("siglip2", "siglip2_vision_model"),
            f"{_FAMILIES}:siglip2",
            ("pool", "mean", "logits", "logit-K"),
            "google/siglip2-base-patch16-naflex",
            loader="Siglip2VisionModel",
            assemble=f"{_OUTPUTS}:siglip",
        ),
        BackboneEntry(
            "vit",
            ("vit",),
            f"{_FAMILIES}:vit",
            ("cls", "pool", "mean", "logits", "logit-K"),
            "google/vit-base-patch16-224",
            may_lack=("pooler", "mask_token"),
            assemble=f"{_OUTPUTS}:vit",
        ),
        BackboneEntry(
            "deit",
            ("deit",),
            f"{_FAMILIES}:deit",
            ("cls", "pool", "mean", "logits", "logit-K"),
            "facebook/deit-base-distilled-patch16-224",
            may_lack=("pooler", "mask_token"),
            assemble=f"{_OUTPUTS}:vit",
        ),
        BackboneEntry(
            "timm-vit",
            ("timm_vit",),
            "pullback.backbones.timm_vit:adapt",
            ("cls", "mean", "logits", "logit-K"),
            "a module of timm, or with its names",
            assemble="pullback.backbones.timm_vit:assemble",
            recognise="pullback.backbones.timm_vit:recognise",
        ),
        BackboneEntry(
            "depth-anything",
            ("depth_anything",),
            f"{_FAMILIES}:depth_anything",
            ("depth", "depth-GxG", "cls", "mean"),
            "depth-anything/Depth-Anything-V2-Base-hf",
            loader="AutoModelForDepthEstimation",
            may_lack=("mask_token",),
            assemble=f"{_OUTPUTS}:depth_anything",
        ),
        BackboneEntry(
            "tiny-scenes",
            ("tiny_scenes",),
            f"{_FAMILIES}:tiny_scenes",
            ("depth", "depth-GxG", "cls", "mean"),
            "tiny-scenes",
            assemble=f"{_OUTPUTS}:tiny_scenes",
        ),
        BackboneEntry(
            "vggt",
            ("vggt",),
            "pullback.vggt.backbone:adapt",
            ("camera", "camera-V", "points", "points-K", "depth", "depth-GxG"),
            "facebook/VGGT-1B",
            load="pullback.vggt.checkpoint:load_vggt",
            # the config.json of the published checkpoints has no model type, and files of weights have none beside them
            names=r"(?i).*vggt.*|.*\.safetensors",
            views=True,
        ),
    )
}

_EMBEDDING, _DENSE, _VGGT = "pullback.decoders.embedding", "pullback.decoders.dense", "pullback.vggt.decoders"
_BOTTLENECK = ("pullback.learning.bottleneck:named_decoder", "one of these behind an S2-VAE: depth@FOLDER, depth@s2vae")
_BEHIND = r"([^@]+)@(.+)"
DECODERS: list[DecoderEntry] = [
    DecoderEntry("cls", f"{_EMBEDDING}:class_token", "the class token after the final norm"),
    DecoderEntry("projection", f"{_EMBEDDING}:projection", "CLIP's embedding in the space that it shares with text"),
    DecoderEntry("pool", f"{_EMBEDDING}:pool", "the model's own pooling head (SigLIP, ViT, DeiT)"),
    DecoderEntry("mean", f"{_EMBEDDING}:patch_mean", "the mean of the patch tokens after the final norm"),
    DecoderEntry("logits", f"{_EMBEDDING}:logits", "the logits of an image classifier"),
    DecoderEntry("logit-K", f"{_EMBEDDING}:logits", "the logit of one class, logit-281 for example", r"logit-(\d+)"),
    DecoderEntry("depth", f"{_DENSE}:depth", "the depth map of a DPT head (Depth Anything, tiny-scenes, DINOv2-S)"),
    DecoderEntry(
        "depth-GxG", f"{_DENSE}:depth", "the depth map averaged down, depth-8x8 for example", r"depth-(\d+)x(\d+)"
    ),
    DecoderEntry("saliency", f"{_DENSE}:saliency", "the saliency head beside a fine-tuned backbone"),
    DecoderEntry("DECODER@FOLDER", *_BOTTLENECK, _BEHIND),
    DecoderEntry(
        "camera",
        f"{_VGGT}:camera",
        "the cameras of all views, 9 numbers each",
        family="vggt",
        options=("pose_derivative",),
    ),
    DecoderEntry(
        "camera-V",
        f"{_VGGT}:camera",
        "the camera of one view, camera-0 for example",
        r"camera-(\d+)",
        family="vggt",
        options=("pose_derivative",),
    ),
    DecoderEntry("points", f"{_VGGT}:points", "64 points of the scene", family="vggt"),
    DecoderEntry(
        "points-K", f"{_VGGT}:points", "K points, points-128 for example", r"points-([1-9]\d*)", family="vggt"
    ),
    DecoderEntry("depth", f"{_VGGT}:depth", "the depth maps of all views", family="vggt"),
    DecoderEntry(
        "depth-GxG",
        f"{_VGGT}:depth",
        "each view's depth map averaged down, depth-8x8 for example",
        r"depth-([1-9]\d*)x([1-9]\d*)",
        family="vggt",
    ),
    DecoderEntry("DECODER@FOLDER", *_BOTTLENECK, _BEHIND, family="vggt"),
]

SCORES: dict[str, ScoreEntry] = {
    entry.name: entry
    for entry in (
        ScoreEntry("importance", "pullback.pruning.scores:as_score", "of a trained importance head", "head"),
        ScoreEntry("exact", "pullback.geometry.scores:exact_importance", "importance by Jacobian products", "probe"),
        ScoreEntry("block-norm", "pullback.geometry.scores:exact_block_norms", "|J_t| by Jacobian products", "probe"),
        ScoreEntry("spn", "pullback.pruning.scores:as_score", "importance of a predicted metric", "spn"),
        ScoreEntry("random", "pullback.pruning.scores:random", "uniform"),
        ScoreEntry(
            "bipartite",
            "pullback.pruning.scores:bipartite_redundancy",
            "how unlike every other patch: the matching of ToMe, in one stage",
        ),
        ScoreEntry("strided", "pullback.pruning.scores:strided_redundancy", "how unlike a patch of every 2 x 2"),
        ScoreEntry(
            "class-attention",
            "pullback.pruning.scores:class_attention",
            "attention of the class token, EViT's score",
        ),
        ScoreEntry("norm", "pullback.pruning.scores:token_norm", "length of the token"),
        ScoreEntry("cls-similarity", "pullback.pruning.scores:class_similarity", "cosine to the class token"),
    )
}

PRESETS: dict[str, PresetEntry] = {
    entry.name: entry
    for entry in (
        PresetEntry("best", "what won on our measurements"),
        PresetEntry("paper", "section 7 of the paper literally"),
        PresetEntry("drop", "the lowest scores go, nothing else"),
        PresetEntry("bipartite", "merging by ToMe's matching, in one stage", "bipartite"),
        PresetEntry("attention-drop", "dropping by class attention, EViT's score", "class-attention"),
        PresetEntry("strided", "merging into one patch of every 2 x 2", "strided"),
        PresetEntry("tome", "ToMe as its authors run it: r tokens are merged in every block", knob="r"),
        PresetEntry("pitome", "PiToMe as its authors run it: every block keeps a share", knob="keep"),
        PresetEntry("evit", "EViT as its authors run it: three blocks fuse all but a share", knob="keep"),
        PresetEntry("resize", "a smaller picture, of which nothing is removed", knob="size"),
        PresetEntry("none", "nothing is removed", knob="none"),
    )
}

FORMER_SCORES = {"tome": "bipartite", "evit": "class-attention"}
"""What scores of one stage were called, after methods that they are not: in files of earlier versions they still are.
No score, and no preset's own one, may have such a name again."""
_FORMER_RULES = {("tome", "tome"): ("bipartite", "bipartite"), ("evit", "evit"): ("attention-drop", "class-attention")}
_AS_PUBLISHED = {
    "tome": 'ToMe as its authors run it is preset="tome", with r= tokens merged in every block',
    "evit": 'EViT as its authors run it is preset="evit"',
}


def register_backbone(entry: BackboneEntry) -> BackboneEntry:
    """Add a family of models, or replace the one of the same name."""
    of_kind("entry", entry, BackboneEntry, "a pullback.BackboneEntry")
    BACKBONES[entry.name] = entry
    return entry


def register_decoder(entry: DecoderEntry) -> DecoderEntry:
    """Add a decoder, or replace the one of the same name and family."""
    of_kind("entry", entry, DecoderEntry, "a pullback.DecoderEntry")
    same = [known for known in DECODERS if (known.name, known.family) == (entry.name, entry.family)]
    for known in same:
        DECODERS.remove(known)
    DECODERS.append(entry)
    return entry


def register_score(entry: ScoreEntry) -> ScoreEntry:
    """Add a score per token, or replace the one of the same name."""
    of_kind("entry", entry, ScoreEntry, "a pullback.ScoreEntry")
    if entry.name in FORMER_SCORES:
        raise PullbackError(
            f"entry: {entry.name!r} means the score {FORMER_SCORES[entry.name]!r} in files of earlier versions. Choose "
            "another name."
        )
    SCORES[entry.name] = entry
    return entry


def current_rule(preset: str, score: str) -> tuple[str, str]:
    """Return what the preset and the score of a stored rule are called now.

    A preset with a former name is the one of that time only beside the score of that time: "tome" with "tome" is
    "bipartite" with "bipartite", and beside any other score it is the published method.
    """
    return _FORMER_RULES.get((preset, score), (preset, current_score(score)))


def current_score(name: str) -> str:
    """Return what a stored score is called now."""
    return FORMER_SCORES.get(name, name)


def check_former_score(argument: str, name: str) -> None:
    """Raise an error that blames ``argument`` for a score by its former name, and says what it is called now."""
    if name in FORMER_SCORES:
        raise PullbackError(
            f"{argument}: the single-stage score {name!r} is now called {FORMER_SCORES[name]!r}. {_AS_PUBLISHED[name]}."
        )


def backbones() -> list[BackboneEntry]:
    """Every family that can be loaded, those of other packages included."""
    load_plugins()
    return list(BACKBONES.values())


def decoders_for(family: str) -> list[DecoderEntry]:
    """The decoders that may be asked for by name with a family of backbones: its own, then those for all.

    Decoders for all families read single images, so a family of several views has its own alone.
    """
    load_plugins()
    own = [entry for entry in DECODERS if entry.family == family]
    views = family in BACKBONES and BACKBONES[family].views
    return own + [entry for entry in DECODERS if entry.family is None and not views]


def list_models() -> list[tuple[str, str, str, str]]:
    """(family, model types in config.json, decoders, example) of everything that can be loaded."""
    return [
        (entry.name, ", ".join(entry.model_types), ", ".join(entry.decoders), entry.example) for entry in backbones()
    ]


def resolve(code: Code) -> Any:
    """Return the object that an entry names: imported if it is given as "package.module:name", else as it is."""
    if not isinstance(code, str):
        return code
    module, _, name = code.partition(":")
    if not name:
        raise PullbackError(f"registry: expected 'package.module:name', got {code!r}.")
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise PullbackError(f"registry: {code!r} does not exist: {module} has no {name!r}. Correct the entry.")
    return found


@cache
def load_plugins() -> tuple[str, ...]:
    """Call every function in the entry-point group `pullback`, once per process; return their names."""
    from importlib.metadata import entry_points  # slow to import, and `--help` does without

    found = []
    for point in entry_points(group=GROUP):
        try:
            point.load()()
        except Exception as error:
            raise PullbackError(
                f"plugin {point.name!r} ({point.value}) could not be loaded: {error!r}. Repair or remove its package."
            ) from error
        found.append(point.name)
    return tuple(found)
