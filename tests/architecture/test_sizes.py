# SPDX-License-Identifier: BSD-3-Clause
"""Limits on functions and signatures, none on files, and one licence line in each."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPDX = "# SPDX-License-Identifier: BSD-3-Clause"
FUNCTION_LINES = 50
PARAMETERS = 7
EXAMPLE_LINES = 130
DEMO_LINES = 300  # of the demo, which has a model, its text and a table

WIDE_SIGNATURES = frozenset({"initialize"})
"""It has Apex's arguments.

This set may only shrink.
"""

GIVEN_SIGNATURES = {
    "cli": None,
    "compat": None,
    "distributed": frozenset({"__init__"}),
    "optim/fused": frozenset({"__init__"}),
}
"""Where Apex prescribes arguments, or the command line one for each option: folders of the package,
and which functions there (all)."""

KERNELS = tuple(
    ROOT / "src" / "preamp" / "kernels" / place
    for place in (
        "rules.py",
        "triton/device",
        "triton/updates.py",
        "jit/loops.py",
        "jit/formats.py",
    )
)
"""Kernels, and formulas in them: what they are told is one parameter each, and does not count."""

LONG = {"update_kernel": 90}
"""The update of every rule, in the order of loads and stores that its registers depend on.

This table may only shrink.
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files_in(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


CODE = files_in("src", "tools", "benchmarks")


def functions_in(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def lines_from(function: Function, start: int) -> int:
    """Lines from ``start`` to the end, without the docstring."""
    lines = (function.end_lineno or function.lineno) - start + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def parameter_count(function: Function) -> int:
    """Number of named parameters, without ``self`` and ``cls``."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def too_long_or_wide(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    found = []
    for function in functions_in(ast.parse(text)):
        where = f"{path.name}:{function.lineno}: {function.name}"
        is_kernel = any(place in (path, *path.parents) for place in KERNELS)
        start = function.body[0].lineno if is_kernel else function.lineno
        if lines_from(function, start) > LONG.get(function.name, FUNCTION_LINES):
            found.append(f"{where} has {lines_from(function, start)} lines")
        if (
            not is_kernel
            and parameter_count(function) > PARAMETERS
            and not may_be_wide(path, function)
        ):
            found.append(f"{where} has {parameter_count(function)} parameters")
    return found


def may_be_wide(path: Path, function: Function) -> bool:
    """Whether the signature of ``function`` is not ours to choose."""
    if function.name in WIDE_SIGNATURES:
        return True
    return any(
        (ROOT / "src" / "preamp" / folder) in path.parents and (not names or function.name in names)
        for folder, names in GIVEN_SIGNATURES.items()
    )


@pytest.mark.full
def test_code_is_within_the_limits() -> None:
    assert [line for path in CODE for line in too_long_or_wide(path)] == []


def test_examples_are_short() -> None:
    lengths = {
        p.name: len(p.read_text(encoding="utf-8").splitlines()) for p in files_in("examples")
    }
    assert lengths.pop("00_demo.py") <= DEMO_LINES
    assert {name: n for name, n in lengths.items() if n >= EXAMPLE_LINES} == {}


def test_every_file_names_its_licence() -> None:
    files = files_in("src", "tests", "tools", "benchmarks", "examples")
    assert [p for p in files if not p.read_text(encoding="utf-8").startswith(SPDX)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f():\n" + "    x = 1\n" * 50, "f has 51 lines"),
        ('def f():\n    """One.\n' + "\n" * 60 + '    """\n' + "    x = 1\n" * 50, "has 51 lines"),
        ("def f(a, b, c, d, e, *, g, h, i): ...", "f has 8 parameters"),
    ],
)
def test_planted_violation_is_found(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(text, encoding="utf-8")
    found = too_long_or_wide(path)
    assert len(found) == 1
    assert expected in found[0]
