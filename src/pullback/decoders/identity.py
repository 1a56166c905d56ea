"""What a decoder, a task distance or an output metric is known by in files: code and parameters, not its name.

Two functions may share a name, and a head that was trained again keeps its own. Files therefore hold an identity, a
short text such as

    layers 11, version pullback-1                                        a decoder of the package, by its name
    layers 11, code 41d0c3f2a6b7e958, parameters 9c12..., Python 3.11    a module of the user
    layers 11, version 2, parameters 9c12...                             the same, with a version that the user gave

``parameters`` is a hash of all tensors that can be reached: parameters and buffers of modules, tensors in closures,
defaults, attributes and globals. Those of the model itself are left out, since its weights have their own hash.
``code`` is a hash of byte code, constants and names, followed into every function, method and global that the code
mentions, except into Python's own library, torch and the like (`BY_NAME`), whose parts are known by their names. It
depends on neither files, line numbers, docstrings nor addresses, so that it is the same in every process; but byte code
differs between minor versions of Python, which is why that one is part of the text.

A ``version`` takes the place of the code: `Decoder` and `PatchGrid` have it as an argument, and functions, modules and
other objects as an attribute. It is needed where something in reach has no stable content, such as a lock or a file,
and where a function imports modules of the user when it runs.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import hashlib
import inspect
import platform
import re
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pullback.backbones import AnyBackbone
from pullback.errors import DecoderError

BY_NAME = frozenset(sys.stdlib_module_names) | {
    *("torch", "torchvision", "numpy", "scipy", "transformers", "timm", "einops", "safetensors", "PIL", "pullback"),
}
"""Packages whose functions and classes are known by their names: another release of them is no other decoder."""
_DIGITS = 16
_SCALARS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_PRINTED = (torch.dtype, torch.device, torch.layout, torch.memory_format, slice, range, re.Pattern, PurePath, np.dtype)
_BY_VALUE = (tuple, frozenset, *_PRINTED)
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_NESTED = inspect.CO_NESTED  # says where a function was defined, not what it does
_OF_MODULES = frozenset(vars(nn.Module()))
_NOT_OUTPUT = frozenset(
    f"__{name}__"
    for name in (
        *("repr", "str", "eq", "hash", "lt", "le", "gt", "ge", "setattr", "delattr", "getstate", "setstate", "reduce"),
        *("reduce_ex", "replace", "init_subclass", "class_getitem", "annotate", "annotate_func", "subclasshook"),
        *("deepcopy", "copy"),
    )
)
"""Methods that no output comes from, many of which `dataclasses` writes."""


def identity_of(
    thing: object, *, argument: str, name: str = "", model: nn.Module | None = None, version: str | None = None
) -> str:
    """Return what ``thing`` is known by: its version or the hash of its code, and the hash of its parameters.

    ``argument`` and ``name`` are for the message, should something in reach have no content that could be hashed.
    ``model``: the backbone's module, whose parts are not looked into.
    """
    version = version or given_version(thing)
    content = _Content(argument, name or name_of(thing), model, strict=version is None)
    content.add(thing, "")
    if version is not None:
        parts = [f"version {version}"]
    elif isinstance(thing, Tensor):
        parts = []
    else:
        parts = [f"code {content.code.hexdigest()[:_DIGITS]}"]
    if content.has_parameters:
        parts.append(f"parameters {content.parameters.hexdigest()[:_DIGITS]}")
    if version is None and content.has_bytecode:
        parts.append("Python " + ".".join(platform.python_version_tuple()[:2]))
    return ", ".join(parts)


def given_version(thing: object) -> str | None:
    """Return the version that stands on an object as an attribute, None where there is none."""
    version = None if isinstance(thing, Tensor) else getattr(thing, "version", None)
    return version if isinstance(version, str) and version else None


def check_version(version: object) -> None:
    """Refuse a version that is no text."""
    if version is not None and not (isinstance(version, str) and version):
        raise DecoderError(f"version: expected a text such as '1', got {version!r}.")


def name_of(thing: object) -> str:
    return getattr(thing, "__name__", type(thing).__name__)


class _Content:
    """Two hashes over all that can be reached from an object; ``strict``: what cannot be hashed is an error."""

    def __init__(self, argument: str, name: str, model: nn.Module | None, *, strict: bool) -> None:
        self.argument, self.name, self.strict = argument, name, strict
        self.code, self.parameters = hashlib.sha256(), hashlib.sha256()
        self.has_parameters = self.has_bytecode = False
        self._numbers: dict[int, int] = {}  # of what was met, by address
        self._met: list[object] = []  # which keeps the addresses taken
        self._of_model: dict[int, str] = {}
        if model is not None:
            tensors = [*model.named_parameters(), *model.named_buffers()]
            self._of_model = {id(part): part_name for part_name, part in [*model.named_modules(), *tensors]}

    def note(self, *texts: str) -> None:
        for text in texts:
            self.code.update(f"{len(text)} {text}\n".encode("utf-8", "surrogatepass"))

    def add(self, value: Any, path: str) -> None:
        """Hash a value; ``path`` is how the code calls it, for the message."""
        if type(value) in _SCALARS:
            self.note(type(value).__name__, repr(value))
        elif id(value) in self._of_model:
            self.note("part of the model", self._of_model[id(value)])
        elif isinstance(value, _BY_VALUE):  # whether two equal ones are one object is a matter of chance
            self._add_new(value, path)
        elif id(value) in self._numbers:
            self.note("met before", str(self._numbers[id(value)]))
        else:
            self._numbers[id(value)] = len(self._met)
            self._met.append(value)
            self._add_new(value, path)

    def _add_new(self, value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            self._tensor(value, path)
        elif isinstance(value, (np.ndarray, np.generic)):
            self._array(np.asarray(value), path)
        elif isinstance(value, nn.Module):
            self._module(value, path)
        elif isinstance(value, AnyBackbone):  # its name is a path, and all else follows from the model
            self.note("backbone", value.family)
            self.add(value.model, path)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.MethodType):
            self.note("method")
            self.add(value.__func__, path)
            self.add(value.__self__, path)
        elif isinstance(value, functools.partial):
            self.note("partial")
            for part in (value.func, value.args, value.keywords):
                self.add(part, path)
        elif isinstance(value, _BUILTIN):
            self._builtin(value, path)
        elif isinstance(value, types.ModuleType):
            self.note("module", value.__name__)
        elif isinstance(value, enum.Enum):
            self.note("enum", type(value).__qualname__, value.name)
        elif isinstance(value, type):
            self._class(value, path)
        elif isinstance(value, _PRINTED):
            self.note(type(value).__name__, str(value) if isinstance(value, PurePath) else repr(value))
        elif isinstance(value, Mapping):
            self.note("mapping", str(len(value)))
            for key, item in value.items():
                self.add(key, path)
                self.add(item, f"{path}[{key!r}]" if isinstance(key, (str, int)) else path)
        elif isinstance(value, (list, tuple, deque)):
            self.note("sequence", type(value).__name__, str(len(value)))
            for number, item in enumerate(value):
                self.add(item, f"{path}[{number}]")
        elif isinstance(value, (set, frozenset)):
            self._set(value, path)
        elif isinstance(value, (property, staticmethod, classmethod, functools.cached_property)):
            for function in _functions_of(value):
                self.add(function, path)
        elif hasattr(value, "__wrapped__"):  # functools.cache and the like
            self.add(value.__wrapped__, path)
        else:
            self._instance(value, path)

    # Numbers

    def _tensor(self, value: Tensor, path: str) -> None:
        try:
            plain = value.detach().as_subclass(Tensor).cpu().contiguous()
            content = plain.reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError, TypeError):  # of the meta device, sparse, quantised
            return self._refuse(value, path)
        self._bytes(f"{value.dtype} {tuple(value.shape)}", content)

    def _array(self, value: np.ndarray, path: str) -> None:
        if value.dtype.hasobject:
            return self._refuse(value, path)
        self._bytes(f"{value.dtype.str} {value.shape}", np.ascontiguousarray(value).tobytes())

    def _bytes(self, kind: str, content: Any) -> None:
        self.has_parameters = True
        self.note("numbers")
        self.parameters.update(f"{kind}\n".encode())
        self.parameters.update(content)

    # Code

    def _function(self, function: types.FunctionType, path: str) -> None:
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None:  # torch.compile changes how it runs, not what it gives
            return self.add(original, path)
        code, module = function.__code__, str(function.__globals__.get("__name__", ""))
        if is_known_by_name(module):
            self.note("function", module, getattr(code, "co_qualname", code.co_name))
        else:
            self._bytecode(code, function.__globals__, function.__doc__)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # nothing in it yet
                self.note("empty")
            else:
                self.add(held, name)
        self.add(function.__defaults__, path)
        self.add(function.__kwdefaults__, path)

    def _bytecode(self, code: types.CodeType, namespace: dict[str, Any], doc: str | None = None) -> None:
        self.has_bytecode = True
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~_NESTED)
        self.note("code", code.co_code.hex(), repr(counts), *code.co_names, "constants")
        for number, constant in enumerate(code.co_consts):
            if isinstance(constant, types.CodeType):
                self._bytecode(constant, namespace)
            elif number > 0 or constant != doc:  # the first one may be the docstring
                self.add(constant, "")
        for name in _imported(code):
            self._refuse(types.ModuleType(name), f"import {name} inside a function")
        for name, attributes in _mentioned(code):
            self.note("global", name)
            missing = object()
            value = namespace.get(name, getattr(builtins, name, missing))
            while isinstance(value, types.ModuleType) and attributes and not is_known_by_name(value.__name__):
                name, value = f"{name}.{attributes[0]}", getattr(value, attributes[0], missing)
                attributes = attributes[1:]
            if value is missing:
                self.note("missing")
            else:
                self.add(value, name)

    def _builtin(self, value: Any, path: str) -> None:
        owner = getattr(value, "__self__", None)
        self.note("builtin", str(getattr(value, "__module__", "")), getattr(value, "__qualname__", value.__name__))
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            self.add(owner, path)

    def _class(self, kind: type, path: str, start: frozenset[str] | None = None) -> None:
        """Hash the members of a class: all of them, or those that can be reached from the names in ``start``."""
        for base in kind.__mro__:
            if is_known_by_name(base.__module__):
                self.note("class", base.__module__, base.__qualname__)
        own = [base for base in kind.__mro__ if not is_known_by_name(base.__module__)]
        members = [(name, member) for base in own for name, member in sorted(_members(base)) if name not in _NOT_OUTPUT]
        wanted = {name for name, _ in members} if start is None else set(start)
        fresh = wanted
        while fresh:
            used = {word for name, member in members if name in fresh for word in _names_in(member)}
            fresh = used - wanted
            wanted = wanted | fresh
        for name, member in members:
            if name in wanted:
                self.note("member", name)
                self.add(member, name)

    # Objects

    def _module(self, module: nn.Module, path: str) -> None:
        original = getattr(module, "_orig_mod", None)
        if isinstance(original, nn.Module):  # torch.compile
            return self.add(original, path)
        self.note("module", f"training {module.training}")
        self._class(type(module), path, _started(type(module), "forward"))
        script = getattr(module, "code", None)
        if isinstance(script, str):  # of torch.jit and torch.fx
            self.note(script)
        for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            self.note(name)
            self.add(value, f"{path}.{name}")
        for name, child in module.named_children():
            self.note(name)
            self.add(child, f"{path}.{name}")
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            self.add(list(hooks.values()), f"a hook of {path}")
        held = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
        self._attributes(self._without_caches(type(module), held), path)

    def _instance(self, value: Any, path: str) -> None:
        kind = type(value)
        slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(value, name)]
        held = vars(value) if hasattr(value, "__dict__") else {}
        held = held | {name: getattr(value, name) for name in slots}
        if is_known_by_name(kind.__module__):
            if not held:
                return self._refuse(value, path)
            held = {name: item for name, item in held.items() if not name.startswith("_")}
        self._class(kind, path, _started(kind))
        self._attributes(self._without_caches(kind, held), path)

    def _attributes(self, held: Mapping[str, Any], path: str) -> None:
        for name in sorted(held):
            self.note("attribute", name)
            self.add(held[name], f"{path}.{name}" if path else name)

    @staticmethod
    def _without_caches(kind: type, held: Mapping[str, Any]) -> dict[str, Any]:
        """Leave out values that a cached_property has put there: they follow from the others, and come and go."""
        return {
            name: item
            for name, item in held.items()
            if not isinstance(getattr(kind, name, None), functools.cached_property)
        }

    def _set(self, value: set[Any] | frozenset[Any], path: str) -> None:
        if not all(type(item) in _SCALARS for item in value):
            return self._refuse(value, path)
        self.note("set", *sorted(f"{type(item).__name__} {item!r}" for item in value))

    def _refuse(self, value: object, path: str) -> None:
        if not self.strict:
            return
        raise DecoderError(
            f"{self.argument}: files have to tell {self.name!r} from others, but it uses {path or 'an object'}, a "
            f"{type(value).__name__}, whose content has no hash. Say which one it is by a version, and change that "
            "whenever its output changes: pb.Decoder(..., version='1'), pb.PatchGrid(..., version='1'), or an "
            "attribute of the function: function.version = '1'."
        )


def is_known_by_name(module: str | None) -> bool:
    """Whether functions and classes of this module are known by their names."""
    return (module or "").partition(".")[0] in BY_NAME


def _imported(code: types.CodeType) -> list[str]:
    """Return the modules that byte code imports when it runs, and whose content is therefore not looked into."""
    imported = (str(each.argval) for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME")
    return [name for name in imported if not is_known_by_name(name)]


def _mentioned(code: types.CodeType) -> list[tuple[str, tuple[str, ...]]]:
    """Return the global names in byte code, each with the attributes that are taken of it at once."""
    found: dict[tuple[str, tuple[str, ...]], None] = {}
    name = ""
    attributes: tuple[str, ...] = ()
    for kind, word in [*((each.opname, each.argval) for each in dis.get_instructions(code)), ("", "")]:
        if name and kind in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes = (*attributes, str(word))
            continue
        if name and not name.startswith("__"):
            found[name, attributes] = None
        name, attributes = str(word) if kind in ("LOAD_GLOBAL", "LOAD_NAME") else "", ()
    return list(found)


def _functions_of(member: object) -> list[Any]:
    """Return the functions behind a member of a class."""
    if isinstance(member, property):
        return [function for function in (member.fget, member.fset) if function is not None]
    if isinstance(member, functools.cached_property):
        return [member.func]
    return [member.__func__] if isinstance(member, (staticmethod, classmethod)) else [member]


def _names_in(member: object) -> Iterator[str]:
    """Yield every name that the code of a member of a class mentions."""
    codes = [function.__code__ for function in _functions_of(member) if isinstance(function, types.FunctionType)]
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _members(kind: type) -> list[tuple[str, Any]]:
    """Return what a class defines itself: no bookkeeping of Python, and nothing that `dataclasses` wrote."""
    written = {"__init__"} if "__dataclass_params__" in vars(kind) else set()
    return [
        (name, member)
        for name, member in vars(kind).items()
        if name not in written
        and name != "_abc_impl"
        and (not name.startswith("__") or isinstance(member, (types.FunctionType, staticmethod, classmethod)))
    ]


def _started(kind: type, *names: str) -> frozenset[str]:
    """Return the members by which an object gives its output: the named ones and operators such as a call."""
    operators = {name for base in kind.__mro__ for name in vars(base) if name.startswith("__")}
    return frozenset(names) | (operators - {"__init__", "__new__", "__post_init__"})


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    named = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))
