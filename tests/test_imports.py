"""Who may import whom among the rooms of the package, and what `import pullback` may cost."""

import ast
import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "pullback"

# Room → the other rooms it may import. A room may always import itself, and these are open to everybody.
OPEN = {"errors", "checks", "tokens", "registry"}
LINEAR_ALGEBRA = {"operators", "randnla"}
PROBES = LINEAR_ALGEBRA | {"models", "data", "runs", "backbones", "decoders", "probes"}
LEARNED = PROBES | {"geometry", "evaluation", "targets", "learning"}
EVERYTHING = LEARNED | {"pruning", "retrieval", "vggt", "scenes", "report", "__init__"}
ALLOWED = {
    "errors": set(),
    "checks": set(),  # of arguments, for everybody
    "tokens": set(),
    "registry": set(),
    "runs": {"__init__"},
    "operators": {"randnla"},
    "randnla": {"operators"},
    "models": set(),
    "data": {"runs"},
    "evaluation": {"runs"},
    "scenes": {"data"},
    "report": {"runs"},
    "backbones": {"operators", "models", "data"},
    "decoders": {"backbones", "models", "operators"},  # operators: to tell a lack of memory from a failing decoder
    "probes": {"operators", "backbones", "decoders", "data"},
    "geometry": PROBES | {"evaluation", "__init__"},
    "targets": PROBES | {"geometry", "__init__"},
    "learning": LEARNED | {"__init__"},
    "pruning": LEARNED | {"__init__"},
    "retrieval": LEARNED | {"__init__"},
    "vggt": LEARNED | {"pruning", "__init__"},
    "experiments": EVERYTHING,
    "cli": EVERYTHING | {"experiments"},
    "__main__": {"cli"},
    "__init__": EVERYTHING,
}
# Room → rooms that it may import inside functions alone: what is shown to a reader (overlay, plot, _repr_html_) is
# drawn by `report`, which those who only compute never load. They hand it numbers; `report` knows nothing of them.
INSIDE_FUNCTIONS = {"geometry": {"report"}, "probes": {"report"}}
# Room → third-party packages it must do without, at module level and inside functions.
FORBIDDEN = {
    "report": {"torch", "transformers"},
    "operators": {"transformers", "PIL"},
    "randnla": {"transformers", "PIL"},
    "data": {"transformers", "torchvision"},
    "evaluation": {"transformers", "torchvision"},
}
OPTIONAL = ("matplotlib", "ray", "gradio", "pyarrow", "datasets", "timm", "faiss")

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    first = file.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_modules(tree: ast.AST, file: Path) -> Iterator[str]:
    """Absolute dotted names of everything that is imported, anywhere in the file."""
    package = ("pullback", *file.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *(node.module.split(".") if node.module else ())))
            if module == "pullback":  # from pullback import data
                yield from (f"pullback.{alias.name}" for alias in node.names)
            else:
                yield module


def without_functions(tree: ast.Module) -> ast.Module:
    """A copy of the file without the bodies of its functions and what only type checkers read."""

    class Emptied(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
            node.body = [ast.Pass()]
            return node

        def visit_If(self, node: ast.If) -> ast.If:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = [ast.Pass()]
            return node

    return Emptied().visit(copy.deepcopy(tree))


def room_imported(module: str) -> str | None:
    """The room that `module` lies in: `pullback` itself and its public names count as `__init__`."""
    parts = module.split(".")
    if parts[0] != "pullback":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "__init__"


def test_every_room_is_in_the_table():
    assert {room_of(file) for file in FILES} - set(ALLOWED) == set(), "a new room: add it to ALLOWED first"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_a_file_imports_only_the_rooms_it_may(file):
    room, tree = room_of(file), ast.parse(file.read_text(encoding="utf-8"))
    at_once = set(imported_modules(without_functions(tree), file))
    for module in imported_modules(tree, file):
        target = room_imported(module)
        if target is not None:
            later = INSIDE_FUNCTIONS.get(room, set()) if module not in at_once else set()
            allowed = ALLOWED[room] | later | {room} | OPEN
            assert target in allowed, f"{room} may not import {module}"
            continue
        package = module.split(".")[0]
        assert package not in FORBIDDEN.get(room, set()), f"{room} may not import {package}"
        if room == "models":
            assert package == "torch" or package in sys.stdlib_module_names, f"models import only torch, not {package}"


def test_what_a_function_imports_is_not_imported_with_the_file():
    tree = ast.parse(
        "import a\nclass C:\n    import b\n    def f(self):\n        import c\nif TYPE_CHECKING:\n    import d"
    )
    assert list(imported_modules(without_functions(tree), PACKAGE / "errors.py")) == ["a", "b"]


def test_only_the_command_line_uses_experiments():
    assert [room for room, allowed in ALLOWED.items() if "experiments" in allowed] == ["cli"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pullback.data.images", ["data"]),
        ("from pullback.probes import ProbeMap", ["probes"]),
        ("from pullback import data, diagnose", ["data", "__init__"]),
        ("import pullback as pb", ["__init__"]),
        ("from . import spectrum", ["randnla"]),
        ("from .svd import krylov", ["randnla"]),
        ("from ..operators.base import LinearOperator", ["operators"]),
        ("from .. import geometry", ["geometry"]),
        ("def f():\n    from pullback.cli import main", ["cli"]),
        ("import torch", [None]),
    ],
)
def test_the_reader_of_imports_sees_through_every_spelling(source, expected):
    modules = imported_modules(ast.parse(source), PACKAGE / "randnla" / "trace.py")
    assert [room_imported(module) for module in modules] == expected


def run_with_blocked(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter in which the `blocked` packages cannot be imported."""
    blocker = f"import sys\nfor name in {blocked!r}:\n    sys.modules[name] = None\n"
    return subprocess.run([sys.executable, "-c", blocker + code], capture_output=True, text=True, timeout=120)


needs_the_package = pytest.mark.skipif(
    not (PACKAGE / "__init__.py").exists(), reason="src/pullback/__init__.py is not written yet"
)


@needs_the_package
def test_import_works_without_optional_packages():
    run = run_with_blocked((*OPTIONAL, "torchvision"), "import pullback")
    assert run.returncode == 0, run.stderr


@needs_the_package
def test_every_public_name_resolves_without_optional_packages():
    code = "import pullback\nfor name in pullback.__all__: getattr(pullback, name)"
    run = run_with_blocked((*OPTIONAL, "torchvision"), code)
    assert run.returncode == 0, run.stderr


@needs_the_package
def test_import_leaves_torch_and_transformers_alone():
    code = "import sys, pullback\nprint([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    assert run_with_blocked((), code).stdout.strip() == "[]"
