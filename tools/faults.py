# SPDX-License-Identifier: BSD-3-Clause
"""Changes of one place in a file, as code objects that can replace those of living functions."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A change of one place in one file."""

    file: str  # below the package
    line: int
    column: int
    what: str
    mask: int  # of the lines, a bit for each
    swaps: Mapping[CodeType, CodeType]  # of functions: code that was there, and is to be
    is_outside: bool = False  # whether anything but the code of functions changes
    source: str = ""  # of the whole file; planted ones only
    tests: tuple[str, ...] = ()  # that have to notice; any if empty

    @property
    def key(self) -> tuple[str, int, int, str]:
        """What tells it from all others."""
        return self.file, self.line, self.column, self.what


def changes(node: ast.AST) -> Iterator[tuple[Any, str, Any, str]]:
    """What slips make of ``node``: the part that changes, the field, its new value, in words."""
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            if type(op) in SWAPS:
                yield node, "ops", [*node.ops[:at], SWAPS[type(op)](), *node.ops[at + 1 :]], ""
    elif isinstance(node, (ast.BoolOp, ast.BinOp, ast.AugAssign)) and type(node.op) in SWAPS:
        yield node, "op", SWAPS[type(node.op)](), ""
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node, "operand", ast.UnaryOp(node.op, node.operand), ""
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        # What is left out stays in the source: names keep their scopes, and closures their cells.
        never = ast.BoolOp(ast.And(), [ast.Constant(False), node.test])
        yield node.test, "test", never, f"never {ast.unparse(node.test)}"
        if not isinstance(node, ast.While):
            always = ast.BoolOp(ast.Or(), [ast.Constant(True), node.test])
            yield node.test, "test", always, f"always {ast.unparse(node.test)}"
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if not isinstance(block, list) or (isinstance(node, ast.If) and len(block) == 1):
            continue  # a condition that never holds leaves its only statement out
        for at, line in enumerate(block):
            is_text = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
            kinds = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Raise)
            if isinstance(line, kinds) and not is_text:
                gone = ast.If(ast.Constant(False), [line], [])
                without = [*block[:at], gone, *block[at + 1 :]]
                yield line, name, without, f"without {ast.unparse(line)}"


def drawn(file: str, path: Path) -> Iterator[Fault]:
    """All faults of one place in the functions of a file."""
    tree = ast.parse(path.read_text("utf-8"))
    original = compile(tree, str(path), "exec", dont_inherit=True)
    for node in ast.walk(tree):
        for place, field, value, words in changes(node):
            before, old = ast.unparse(place), getattr(node, field)
            setattr(node, field, value)
            ast.fix_missing_locations(tree)
            what = words or f"{before} → {ast.unparse(place)}"
            changed = compile(tree, str(path), "exec", dont_inherit=True)
            swaps, is_outside = compared(original, changed)
            setattr(node, field, old)
            if swaps and not is_outside:
                mask = mask_of(place.lineno, place.end_lineno)
                yield Fault(file, place.lineno, place.col_offset, what, mask, swaps)


def planted(file: str, path: Path, tests: str, old: str, new: str) -> Fault:
    """The fault that puts ``new`` where ``old`` stands."""
    source = path.read_text("utf-8") if path.is_file() else ""
    if source.count(old) != 1:
        raise SystemExit(f"{file} should have once, and has {source.count(old)} times: {old!r}")
    # As many lines as before: codes are found by where they begin.
    changed = source.replace(old, "\n" * (old.count("\n") - new.count("\n")) + new)
    codes = [compile(text, str(path), "exec", dont_inherit=True) for text in (source, changed)]
    swaps, is_outside = compared(*codes)
    if not swaps and not is_outside:
        raise SystemExit(f"{file} does the same with {new!r} for {old!r}")
    before = source[: source.index(old)].split("\n")
    line, column = len(before), len(before[-1])
    what = f"{old.strip()} → {new.strip()}"
    mask = mask_of(line, line + old.rstrip().count("\n"))
    names = tuple(f"tests/{name}" for name in tests.split())
    return Fault(file, line, column, what, mask, swaps, is_outside, changed, names)


def mask_of(first: int, last: int) -> int:
    """Lines as one number, with a bit for each."""
    return (1 << last + 1) - (1 << first)


def compared(old: CodeType, new: CodeType) -> tuple[dict[CodeType, CodeType], bool]:
    """The functions whose code differs, and whether anything else does."""
    swaps, is_outside = dict[CodeType, CodeType](), False
    pairs = [(old, new)]
    while pairs:
        one, other = pairs.pop()
        if bare(one) == bare(other):
            continue
        if not one.co_flags & inspect.CO_OPTIMIZED:  # of a module or a class
            is_outside |= bare(one, is_deep=False) != bare(other, is_deep=False)
        elif one.co_freevars == other.co_freevars:
            swaps[one] = other
        else:  # functions that are there have other cells
            is_outside = True
        others = dict(parts(other))
        pairs += [(code, others[key]) for key, code in parts(one) if key in others]
    return swaps, is_outside


def parts(code: CodeType) -> Iterator[tuple[object, CodeType]]:
    """The codes in ``code``, by what finds them in a changed one."""
    seen = Counter[object]()
    for part in code.co_consts:
        if isinstance(part, CodeType):
            key = part.co_name, part.co_firstlineno
            seen[key] += 1
            yield (key, seen[key]), part


def bare(code: CodeType, *, is_deep: bool = True) -> CodeType:
    """``code`` without columns, and without what is in functions unless ``is_deep``."""
    inner = [
        (bare(part) if is_deep else part.co_name) if isinstance(part, CodeType) else part
        for part in code.co_consts
    ]
    return code.replace(co_linetable=b"", co_consts=tuple(inner))
