# SPDX-License-Identifier: BSD-3-Clause
"""The rules of the source tree, as functions from a folder to a list of violations.

They read syntax only, so they can be pointed at a folder with a planted violation.
"""

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LAYERS = (
    ("cli", "compat", "integrations"),
    ("checkpoint", "distributed", "doctor", "memory"),
    ("watch",),
    ("engine",),
    ("report",),
    ("numerics",),
    ("casting", "scaling", "optim"),
    ("policy", "kernels"),
    ("core",),
)
"""A room imports only from rooms in later rows; rooms of one row do not see each other."""

FACADES = ("amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")
"""Users' entrances, above all rooms: they re-export and no room imports them."""

PROGRAMS = ("cli",)
"""Rooms that use preamp as a user does: they may import the package itself."""

DEPTH = {room: depth for depth, row in enumerate(LAYERS) for room in row}

ONLY_UNDER = {
    "triton": ("preamp.kernels.triton",),
    "numba": ("preamp.kernels.jit",),
    "llvmlite": ("preamp.kernels.jit",),
    "torch.distributed": (
        "preamp.distributed",
        "preamp.checkpoint",
        "preamp.core.ranks",
        "preamp.core.splits",
    ),
}
"""Modules that may be imported below the named packages only."""

PRIVATE_TORCH_UNDER = ("preamp.core.torch_private", "preamp.kernels")
LATE_IMPORTS_IN = (
    "preamp.engine.engine",  # the report
    "preamp.engine.overflow",  # records
    "preamp.numerics.tensorboard",  # an extra, and slower to import than all of preamp
    "preamp.report.drawing",  # matplotlib, as the next one
    "preamp.report.page",  # jinja2, which the library is imported without
    "preamp.watch.casts",  # records
    "preamp.watch.inventory",  # records
    "preamp.watch.makers",  # watchers load with the first engine
)


@dataclass(frozen=True)
class Import:
    """One imported name: ``from module import name``, or ``import module`` with an empty name."""

    module: str
    name: str
    line: int
    inside_function: bool

    @property
    def target(self) -> str:
        """Dotted path of what is imported."""
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    path: Path
    module: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    @property
    def room(self) -> str:
        """First folder below the package, or the empty string for the package's own files."""
        parts = self.module.split(".")
        return parts[1] if len(parts) > 1 else ""

    def under(self, packages: tuple[str, ...]) -> bool:
        return any(is_inside(self.module, package) for package in packages)

    def at(self, line: int, text: str) -> str:
        return f"{self.module}:{line}: {text}"


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def read_package(root: Path) -> list[Source]:
    """Read every Python file below ``root``, the folder of the package itself."""
    sources = []
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources.append(Source(path, module))
    return sources


def imports_of(source: Source) -> Iterator[Import]:
    """Yield all imports, wherever they stand; ``TYPE_CHECKING`` blocks count as well."""
    late = {
        id(node)
        for function in ast.walk(source.tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "", node.lineno, id(node) in late)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, id(node) in late)


def dependency_violations(sources: list[Source]) -> list[str]:
    """Imports that point up, sideways, at a facade, or are relative."""
    found = []
    for source in sources:
        for item in imports_of(source):
            reason = _why_not(source, item)
            if reason:
                found.append(source.at(item.line, f"imports {item.target}: {reason}"))
    return found


def _why_not(source: Source, item: Import) -> str:
    if item.module.startswith("."):
        return "imports are absolute"
    if not is_inside(item.module, "preamp"):
        return ""
    here, there = source.room, _room_of(item)
    if here == there:
        return ""
    if not there:
        return "" if here in (*PROGRAMS, *FACADES, "__main__") else "the package sees its rooms"
    if there in FACADES:
        return "" if here in (*PROGRAMS, "") else "no room imports a facade"
    if there not in DEPTH:
        return f"{there!r} is in no row of LAYERS"
    if here in FACADES or here in ("", "__main__"):
        return ""
    if here not in DEPTH:
        return f"{here!r} is in no row of LAYERS"
    if DEPTH[there] == DEPTH[here]:
        return "rooms of one row do not see each other"
    return "" if DEPTH[there] > DEPTH[here] else "imports point down"


def _room_of(item: Import) -> str:
    parts = item.target.split(".")
    known = {*DEPTH, *FACADES}
    if len(item.module.split(".")) > 1 or (len(parts) > 1 and parts[1] in known):
        return parts[1]
    return ""


def import_circles(sources: list[Source]) -> list[str]:
    """Files that import each other in a circle, for the sake of types included."""
    names = {source.module for source in sources}
    imported = {
        source.module: {
            name
            for item in imports_of(source)
            for name in (item.module, item.target)
            if name in names and name != source.module
        }
        for source in sources
        if source.path.name != "__init__.py"
    }
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


def forbidden_imports(sources: list[Source]) -> list[str]:
    """Imports that are confined to certain packages, found elsewhere."""
    return [
        source.at(item.line, f"imports {item.target}; only under {', '.join(allowed)}")
        for source in sources
        for item in imports_of(source)
        for name, allowed in ONLY_UNDER.items()
        if is_inside(item.target, name) and not source.under(allowed)
    ]


def late_imports(sources: list[Source]) -> list[str]:
    """Imports inside functions, other than programs loading third-party packages."""
    return [
        source.at(item.line, f"imports {item.target} inside a function")
        for source in sources
        if not source.under(LATE_IMPORTS_IN)
        for item in imports_of(source)
        if item.inside_function
        and (source.room not in PROGRAMS or is_inside(item.module, "preamp"))
    ]


def private_torch(sources: list[Source]) -> list[str]:
    """Underscored names of torch, reached by import, attribute or ``getattr``."""
    found = []
    for source in sources:
        if source.under(PRIVATE_TORCH_UNDER):
            continue
        roots = {"torch"}
        for item in imports_of(source):
            if is_inside(item.module, "torch"):
                roots |= _bound_names(source, item)
                if any(is_private(part) for part in item.target.split(".")):
                    found.append(source.at(item.line, f"imports {item.target}"))
        found += [source.at(line, f"uses {name}") for line, name in _private_uses(source, roots)]
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _bound_names(source: Source, item: Import) -> set[str]:
    """Names that ``item`` binds in the file, its ``as`` spelling included."""
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node.lineno == item.line:
            return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return set()


def _private_uses(source: Source, roots: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            chain = _chain(node)
            if chain and chain[0] in roots:
                yield node.lineno, ".".join(chain)
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            if getattr(node.func, "id", "") not in ("getattr", "hasattr", "setattr"):
                continue
            chain, name = _chain(node.args[0]), getattr(node.args[1], "value", None)
            if chain and chain[0] in roots and isinstance(name, str) and is_private(name):
                yield node.lineno, ".".join((*chain, name))


def _chain(node: ast.expr) -> tuple[str, ...]:
    """``a.b.c`` as its parts, or nothing if the expression is not such a chain."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, *reversed(parts)) if isinstance(node, ast.Name) else ()


def logic_in_exports(sources: list[Source]) -> list[str]:
    """Statements in ``__init__`` files and facades other than imports and dunder constants."""
    found = []
    for source in sources:
        if source.path.name != "__init__.py" and source.room not in FACADES:
            continue
        for node in source.tree.body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not (is_docstring or isinstance(node, (ast.Import, ast.ImportFrom))):
                if not (_assigns_dunder(node) or _is_guard(node)):
                    found.append(
                        source.at(node.lineno, "an __init__ file or a facade only re-exports")
                    )
    return found


def _assigns_dunder(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [name for t in targets for name in (t.elts if isinstance(t, ast.Tuple) else [t])]
    allowed = ("__all__", "__dir__", "__getattr__", "__version__")
    return all(isinstance(name, ast.Name) and name.id in allowed for name in names)


def _is_guard(node: ast.stmt) -> bool:
    """Whether ``node`` has a single call if the file is run, or imports for type checkers."""
    if not isinstance(node, ast.If) or node.orelse:
        return False
    if ast.unparse(node.test) == "TYPE_CHECKING":
        return all(isinstance(part, (ast.Import, ast.ImportFrom)) for part in node.body)
    return ast.unparse(node.test) == "__name__ == '__main__'" and len(node.body) == 1
