"""Small networks as folders: config.json, model.safetensors and a model card, here or on the hub.

`huggingface_hub.PyTorchModelHubMixin` writes such folders too, but loads a folder without config.json, or of another
kind of network, until something fails inside; the checks that turn this into errors with a fix are most of this file.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from pullback import models
from pullback.backbones.loading import fetched_file
from pullback.checks import of_kind
from pullback.errors import DamagedModelError, ModelError, PullbackError, first_line
from pullback.learning.fit import Trainable
from pullback.runs.documents import CHECKPOINT
from pullback.runs.files import CONFIG, WEIGHTS, write_network, write_text

CARD, MODEL = "README.md", "model"
_NUMBERS = ("blocks", "fingerprint")  # of an origin, which say nothing to a reader
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_Model = TypeVar("_Model", bound="Pretrained")


@dataclass(frozen=True)
class Origin:
    """What a network was made for, so that it is not used for something else. None: not known, and not checked."""

    family: str | None = None
    weights: str | None = None  # hash of the backbone's weights
    layer: int | None = None
    decoder: str | None = None
    rank: int | None = None
    resolutions: tuple[tuple[int, int], ...] = ()  # (height, width) of the images
    decoder_identity: str | None = None  # code and parameters of the decoder, see `decoders.identity`
    distance: str | None = None  # name of the task distance
    output_metric: str | None = None  # name or hash of the output metric
    blocks: Mapping[str, str] = field(default_factory=dict)  # hashes of the backbone's blocks, see `backbones.weights`
    fingerprint: Mapping[str, Any] = field(default_factory=dict)  # of what ships: see `backbones.shipped`

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Origin:
        values = {field.name: stored[field.name] for field in fields(cls) if field.name in stored}
        values["resolutions"] = tuple((int(h), int(w)) for h, w in values.get("resolutions", ()))
        return cls(**values)

    def check(
        self,
        argument: str,
        *,
        family: str,
        layer: int,
        weights: str | None = None,
        decoder: str | None = None,
        decoder_identity: str | None = None,
    ) -> None:
        """Raise an error that names ``argument`` where the network is used with another family, layer, set of weights
        or decoder. A depth map that is averaged down to other cells is the same decoder."""
        same_name = self.decoder == decoder
        for name, made_for, asked in (
            ("family", self.family, family),
            ("layer", self.layer, layer),
            ("weights", self.weights, weights),
            ("decoder", without_cells(self.decoder), without_cells(decoder)),
            ("decoder", self.decoder_identity if same_name else None, decoder_identity),
        ):
            if made_for is not None and asked is not None and made_for != asked:
                raise ModelError(
                    f"{argument}: it was trained for {name} {made_for}, and is used with {name} {asked}. Train one for "
                    f"this {name} (pullback train), or use it where it belongs."
                )


def without_cells(decoder: str | None) -> str | None:
    """Return the name of a decoder without its cells: depth-8x8 -> depth, depth-8x8@FOLDER -> depth@FOLDER."""
    return None if decoder is None else re.sub(r"-\d+x\d+(?=@|$)", "", decoder)


class Pretrained(Trainable):
    """A network that is rebuilt from ``config``, a frozen dataclass with `Origin` and scores, and its weights. ``kind``
    stands in config.json, so that a head is not loaded as something else."""

    title: ClassVar[str]

    @classmethod
    @abstractmethod
    def config_from_dict(cls, stored: Mapping[str, Any]) -> Any:
        """Return the config from what config.json holds."""

    @classmethod
    @abstractmethod
    def from_config(cls: type[_Model], config: Any) -> _Model:
        """Return the network with random weights."""

    def describe(self: _Model, **changes: Any) -> _Model:
        """Set what the network was made for (``origin``), its ``scores``, or another field of its config."""
        self.config = replace(self.config, **changes)
        return self

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the three files; the folder is made where it is missing."""
        path = write_network(folder, self, {"kind": self.kind, **asdict(self.config)})
        write_text(path / CARD, self.card())
        return path

    @classmethod
    def from_pretrained(cls: type[_Model], name: str | Path, *, device: str | torch.device = "cpu") -> _Model:
        """Load a folder that `save_pretrained` wrote, one that `pullback train` wrote, a hub id, or by its name what
        comes with the package, such as "tiny-scenes-s2vae" or "tiny-scenes-heads/cls-L03"; in evaluation mode."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        of_kind("name", name, (str, Path), "a folder or a hub id", ModelError)
        name = model_folder(name)
        document = _document(str(name))
        if document.get("kind") != cls.kind:
            raise ModelError(
                f"name: {name} holds {document.get('kind') or 'no model of this package'}, expected {cls.kind}. "
                "Load it with the class that saved it."
            )
        try:
            model = cls.from_config(cls.config_from_dict(document))
        except (KeyError, TypeError, ValueError, AttributeError, PullbackError) as error:
            reason = str(error) if isinstance(error, PullbackError) else f"{error!r}."
            raise DamagedModelError(
                f"name: {CONFIG} in {name} is not one of {cls.kind}: {reason} Save it again."
            ) from None
        try:
            model.load_state_dict(load_file(_file(str(name), WEIGHTS)))
        except SafetensorError as error:
            raise DamagedModelError(f"name: {WEIGHTS} in {name} cannot be read: {error}. Save it again.") from None
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise DamagedModelError(f"name: the weights in {name} do not fit its config.json: {reason}") from None
        return model.to(device).eval()

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the three files; return the address of the commit. Needs a login (`hf auth login`) or ``token``."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi(token=token)
        api.create_repo(repo_id, exist_ok=True, private=private)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=f"{self.title} of pullback")
        return str(commit.commit_url)

    def card(self) -> str:
        """Return the model card: what it is, what it was made for, and the scores that were measured."""
        origin, scores = self.config.origin, self.config.scores
        lines = ["---", "library_name: pullback", "tags: [pullback, vision-transformer]", "---", "", f"# {self.title}"]
        lines += ["", self.__class__.__doc__.strip().splitlines()[0] if self.__class__.__doc__ else "", ""]
        told = {name: value for name, value in asdict(origin).items() if name not in _NUMBERS}
        made = {name: value for name, value in told.items() if value not in (None, ())}
        lines += ["Made for:", *(f"- {name}: {value}" for name, value in made.items())] if made else []
        lines += ["", "| score | value |", "|---|---|"] if scores else ["", "No scores were measured."]
        lines += [f"| {name} | {value:.4g} |" for name, value in scores.items()]
        parameters = sum(parameter.numel() for parameter in self.parameters())
        lines += ["", f"{parameters:,} parameters. Load it with", ""]
        lines += ["```python", f"import pullback as pb\n\nmodel = pb.{type(self).__name__}.from_pretrained(...)", "```"]
        return "\n".join(lines) + "\n"


def model_folder(name: str | Path) -> Path | str:
    """Return where the three files are: ``name`` itself, model/ in it, where `pullback train` puts them, or the folder
    of what comes with the package under this name."""
    folder = Path(name)
    if not folder.is_dir():
        trained = models.WEIGHTS / folder
        inside = not folder.is_absolute() and len(folder.parts) <= 2 and ".." not in folder.parts
        known = inside and str(name) not in models.EMBEDDED and (trained / CONFIG).is_file()
        return trained if known else name
    if (folder / CONFIG).is_file():
        return name
    if (folder / MODEL / CONFIG).is_file():
        return folder / MODEL
    if (folder / CHECKPOINT).is_file():
        raise ModelError(
            f"name: the training in {name} has not come to its end, and there is no {MODEL}/ in it yet. Run the same "
            "`pullback train` again, which goes on from its checkpoint; in Python, save what the same call returns: "
            f"save_pretrained({str(folder / MODEL)!r})."
        )
    return name


def _document(name: str) -> dict[str, Any]:
    """Return what config.json holds; an empty dict where that is no object."""
    try:
        document = json.loads(_file(name, CONFIG).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DamagedModelError(f"name: {CONFIG} in {name} is no JSON: {error}. Save it again.") from None
    return document if isinstance(document, dict) else {}


def _file(name: str, filename: str) -> Path:
    """Return the path of a file in a folder, or of its copy from the hub."""
    if not Path(name).is_dir() and not _HUB_ID.fullmatch(name):  # the hub would be asked several times over
        raise ModelError(
            f"name: {name!r} is neither a folder nor a hub id that can be reached: there is no such folder, and an id "
            "of the hub has the form owner/name."
        )
    try:
        path = fetched_file(name, filename)
    except Exception as error:  # the hub client raises validation, network and not-found errors of many classes
        raise ModelError(
            f"name: {name!r} is neither a folder nor a hub id that can be reached: {first_line(error)}"
        ) from None
    if path is None:
        raise ModelError(f"name: {name} has no {filename}. Expected one written by save_pretrained.")
    return path
