# SPDX-License-Identifier: BSD-3-Clause
"""Fail if a public name has no docstring or no entry in the API pages, or an argument no text.

The API pages are generated from docstrings, so a name is documented exactly if it has one and
some page asks for it by ``::: preamp.name``. Its arguments are named in the docstring, in the text
of that page, or on the page about the arguments of `initialize`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api"
MODULES = (
    "preamp",
    "preamp.amp",
    "preamp.checkpoint",
    "preamp.compat.multi_tensor.amp_C",
    "preamp.compat.multi_tensor.apex_C",
    "preamp.fp16_utils",
    "preamp.memory",
    "preamp.multi_tensor_apply",
    "preamp.normalization",
    "preamp.numerics",
    "preamp.optimizers",
    "preamp.parallel",
    "preamp.report",
)
# Read, not imported: each needs its framework.
INTEGRATIONS = ROOT / "src" / "preamp" / "integrations"
OF_PYTHON = ("self", "args", "kwargs")


def main() -> int:
    """Print what is missing; return the exit status."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(API.glob("*.md")))
    modules = [importlib.import_module(name) for name in MODULES]
    missing = [line for module in modules for line in undocumented(module, modules[0], pages)]
    missing += [line for module in modules for line in unexplained(module, texts_by_entry())]
    entries = integration_names()
    missing += [f"{name}: no '::: {name}' in docs/api" for name in entries if name not in pages]
    for line in missing:
        print(line, file=sys.stderr)
    names = sum(len(public_names(module)) for module in modules) + len(entries)
    print(f"{names} public names, {len(missing)} gaps in docs/api")
    return 1 if missing else 0


def public_names(module: ModuleType) -> list[str]:
    """Names in ``__all__``; without one, what is imported and has no underscore."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return list(names)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    ]


def integration_names() -> list[str]:
    """Classes of `preamp.integrations` that users name; those of ``shared`` are not among them."""
    return [
        f"preamp.integrations.{file.stem}.{node.name}"
        for file in sorted(INTEGRATIONS.glob("*.py"))
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and file.stem != "shared" and node.name[0] != "_"
    ]


def texts_by_entry() -> dict[str, str]:
    """Entry → what its page says in words, and the page on the arguments of `initialize`."""
    found: dict[str, str] = {}
    shared = (ROOT / "docs" / "arguments.md").read_text(encoding="utf-8")
    for page in API.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        found |= dict.fromkeys(re.findall(r"^::: (\S+)$", text, re.MULTILINE), text + shared)
    return found


def unexplained(module: ModuleType, texts: Mapping[str, str]) -> list[str]:
    """Return one line for each argument of ``module``'s functions that no text names.

    A subclass may leave to its base what it takes over; records have their fields as attributes.
    """
    found: list[str] = []
    for name in public_names(module):
        value, where = getattr(module, name), f"{module.__name__}.{name}"
        if where not in texts or dataclasses.is_dataclass(value):
            continue
        functions = {where: value} if inspect.isfunction(value) else {}
        if inspect.isclass(value):
            own = {key: item for key, item in vars(value).items() if inspect.isfunction(item)}
            public = {key: item for key, item in own.items() if not key.startswith("_")}
            functions = {f"{where}.{key}": item for key, item in public.items()}
        for place, function in functions.items():
            text = (inspect.getdoc(function) or "") + (inspect.getdoc(value) or "") + texts[where]
            found += [
                f"{place}: nothing tells what {argument!r} is"
                for argument in inspect.signature(function).parameters
                if argument not in OF_PYTHON and not re.search(rf"\b{re.escape(argument)}\b", text)
            ]
    return found


def undocumented(module: ModuleType, home: ModuleType, pages: str) -> list[str]:
    """Return one line for each gap of ``module``.

    Args:
        module: Where the names are looked up.
        home: The package; a facade's name that is the same object there, or torch's own, is
            documented there and need only be mentioned.
        pages: Text of all API pages.

    Returns:
        Lines that name the gap; empty if there is none.
    """
    found: list[str] = []
    for name in public_names(module):
        value = getattr(module, name)
        where = f"{module.__name__}.{name}"
        is_elsewhere = module is not home and value is getattr(home, name, None)
        is_internal = name.startswith("_") and not name.endswith("__")
        is_torchs = (getattr(value, "__module__", None) or "").partition(".")[0] == "torch"
        if is_elsewhere or is_internal or is_torchs or isinstance(value, ModuleType):
            mentions = (f"`{name}`", f"`{where}`", f"::: {where}")
            if not any(mention in pages for mention in mentions):
                found.append(f"{where}: not mentioned on a page of docs/api")
            continue
        if not re.search(rf"^::: {re.escape(where)}$", pages, re.MULTILINE):
            found.append(f"{where}: no '::: {where}' in docs/api")
        found += [f"{place}: no docstring" for place in without_docstring(where, value)]
    return found


def without_docstring(where: str, value: object) -> list[str]:
    """Return the function, or the class and its public members, that have no docstring."""
    if inspect.isclass(value):
        members = [
            f"{where}.{name}"
            for name, member in vars(value).items()
            if not name.startswith("_")
            and (inspect.isfunction(member) or isinstance(member, (property, classmethod)))
            and not inspect.getdoc(member)
        ]
        return members if has_own_doc(value) else [where, *members]
    if inspect.isroutine(value):
        return [] if inspect.getdoc(value) else [where]
    return []  # a constant's text stands below it in the source and is read by the docs build


def has_own_doc(value: type) -> bool:
    """Whether the class has a docstring of its own, not a generated or inherited one."""
    text = value.__dict__.get("__doc__") or ""
    return bool(text) and not text.startswith(f"{value.__name__}(")


if __name__ == "__main__":
    sys.exit(main())
