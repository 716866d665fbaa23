"""The direction of dependencies, and the sizes beyond which a concept is missing."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cachedit
from cachedit.strategy import canonical

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("kernels", "cachedit", "strategies", "calibration", "samples")  # each imports itself and what is left of it
TOP = ("__main__", "cli", "evaluate", "app", "benchmarks")  # may import everything, and nothing below imports them
PACKAGE = sorted(path for name in LAYERS for path in (ROOT / name).rglob("*.py"))
FILES = [*PACKAGE, *sorted((ROOT / "benchmarks").rglob("*.py")), *ROOT.glob("app.py")]
FILE_LINES, FUNCTION_LINES = 320, 70


def layer(dotted: str) -> int:
    """Rank of a module name: "cachedit.feature.clock" is of the core, "cachedit.strategies" above it."""
    parts = dotted.split(".")
    part = parts[1] if parts[0] == "cachedit" and len(parts) > 1 else parts[0]
    if part in TOP or part == "samples":
        return len(LAYERS) - 1
    return LAYERS.index(part) if part in LAYERS else LAYERS.index("cachedit")


def name_of(path: Path) -> str:
    """Dotted name under which a file is imported."""
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return dotted if dotted.startswith("cachedit") else f"cachedit.{dotted}"


def typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(node: ast.AST, package: str, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether the import waits inside a function) of every import of this project that is really executed."""
    for child in ast.iter_child_nodes(node):
        if typing_only(child):
            continue
        deferred = inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        found: list[str] = []
        if isinstance(child, ast.Import):
            found = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            base = importlib.util.resolve_name("." * child.level + (child.module or ""), package)
            # "from cachedit import strategies" imports a module
            found = [f"{base}.{alias.name}" for alias in child.names] if base == "cachedit" else [base]
        for module in found:
            if module.split(".")[0] in ("cachedit", "app", *LAYERS, "benchmarks", "tests"):
                yield module, deferred
        yield from imports(child, package, deferred)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_layer_imports_only_layers_below_it(path: Path) -> None:
    name, mine = name_of(path), layer(name_of(path))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for module, deferred in imports(parse(path), package):
        assert module.split(".")[0] not in LAYERS[2:], f"{name} imports the bare name {module}"
        # the registry fills itself on first use: the core asks for the package, never for one strategy
        registry = module == "cachedit.strategies" and mine == LAYERS.index("cachedit") and deferred
        assert layer(module) <= mine or registry, f"{name} imports {module} of a higher layer"
        if module.startswith(("cachedit.cli", "cachedit.evaluate", "cachedit.app")) and not deferred:
            allowed = ("cachedit.__main__", "cachedit.cli", "cachedit.evaluate", "cachedit.app", "cachedit.benchmarks")
            assert name.startswith(allowed), name


@pytest.mark.parametrize(
    "path", [path for path in PACKAGE if layer(name_of(path)) == LAYERS.index("cachedit")], ids=name_of
)
def test_the_core_names_no_strategy(path: Path) -> None:
    tree = parse(path)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if _has_docstring(node)}  # type: ignore[attr-defined]
    names = {canonical(name) for name in cachedit.strategies()}  # type: ignore[operator]
    for node in ast.walk(tree):
        text = {
            ast.Constant: lambda n: n.value if isinstance(n.value, str) and id(n) not in docstrings else "",
            ast.Name: lambda n: n.id,
            ast.Attribute: lambda n: n.attr,
        }.get(type(node), lambda n: "")(node)
        words = {canonical(word) for word in re.findall(r"[\w-]+", text)}
        assert not words & names, f"{name_of(path)}:{node.lineno} names {words & names}"  # type: ignore[attr-defined]


def _has_docstring(node: ast.AST) -> bool:
    documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    return documented and ast.get_docstring(node) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_and_no_function_is_too_long(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= FILE_LINES
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < FUNCTION_LINES, node.name
