# SPDX-License-Identifier: BSD-3-Clause
"""Fail if a public name has no docstring or no entry in the API pages.

The API pages are generated from docstrings, so a name is documented exactly if it has one and
some page asks for it by ``::: preamp.name``.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

API = Path(__file__).parents[1] / "docs" / "api"
MODULES = (
    "preamp",
    "preamp.amp",
    "preamp.checkpoint",
    "preamp.compat.multi_tensor.amp_C",
    "preamp.compat.multi_tensor.apex_C",
    "preamp.compat.multi_tensor.fused_adam_cuda",
    "preamp.fp16_utils",
    "preamp.multi_tensor_apply",
    "preamp.normalization",
    "preamp.optimizers",
    "preamp.parallel",
    "preamp.planning.records",
)


def main() -> int:
    """Print what is missing; return the exit status."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(API.glob("*.md")))
    modules = [importlib.import_module(name) for name in MODULES]
    missing = [line for module in modules for line in undocumented(module, modules[0], pages)]
    for line in missing:
        print(line, file=sys.stderr)
    names = sum(len(public_names(module)) for module in modules)
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
