# SPDX-License-Identifier: BSD-3-Clause
"""Changes of one place in a file, as code objects that can replace those of living functions."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip

Row = dict[str, Any]
Swaps = dict[CodeType, CodeType]  # of functions: code that is there, and is to be


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
                without = [*block[:at], ast.If(ast.Constant(False), [line], []), *block[at + 1 :]]
                yield line, name, without, f"without {ast.unparse(line)}"


def drawn(file: str) -> Iterator[tuple[Row, Swaps]]:
    """All faults of one place in the functions of a file."""
    path = Path(file).absolute()
    tree = ast.parse(path.read_text("utf-8"))
    original = compile(tree, path, "exec", dont_inherit=True)
    for node in ast.walk(tree):
        for place, field, value, words in changes(node):
            before, old = ast.unparse(place), getattr(node, field)
            setattr(node, field, value)
            ast.fix_missing_locations(tree)
            what = words or f"{before} → {ast.unparse(place)}"
            swaps = compared(original, compile(tree, path, "exec", dont_inherit=True))
            setattr(node, field, old)
            if swaps:
                yield row(file, place.lineno, place.end_lineno, place.col_offset, what), swaps


def planted(file: str, old: str, new: str) -> tuple[Row, Swaps]:
    """The fault that puts ``new`` where ``old`` stands."""
    path = Path(file).absolute()
    source = path.read_text("utf-8")
    if source.count(old) != 1:
        raise SystemExit(f"{file} should have once, and has {source.count(old)} times: {old!r}")
    # As many lines as before: codes are found by where they begin.
    changed = source.replace(old, "\n" * (old.count("\n") - new.count("\n")) + new)
    swaps = compared(*(compile(s, path, "exec", dont_inherit=True) for s in (source, changed)))
    if not swaps:
        raise SystemExit(f"{file}: no function changes with {new!r} for {old!r}")
    *above, left = source[: source.index(old)].split("\n")
    last = len(above) + 1 + old.rstrip().count("\n")
    return row(file, len(above) + 1, last, len(left), f"{old} → {new}"), swaps


def row(file: str, line: int, last: int, column: int, what: str) -> Row:
    """What a matrix says of a fault."""
    name = f"{file}:{line}:{column}: {' '.join(what.split())}"
    return {"fault": name, "file": file, "lines": [*range(line, last + 1)]}


def codes(code: CodeType) -> list[CodeType]:
    """``code``, and all codes in it."""
    inner = [codes(part) for part in code.co_consts if isinstance(part, CodeType)]
    return [code, *(part for parts in inner for part in parts)]


def bare(code: CodeType) -> CodeType:
    """``code`` without columns."""
    inner = [bare(part) if isinstance(part, CodeType) else part for part in code.co_consts]
    return code.replace(co_linetable=b"", co_consts=tuple(inner))


def compared(old: CodeType, new: CodeType) -> Swaps:
    """The functions whose code differs, or that of functions in them."""
    swaps = Swaps()
    after = defaultdict[object, list[CodeType]](list)
    for code in codes(new):
        after[code.co_name, code.co_firstlineno].append(code)
    for code in codes(old):
        others = after[code.co_name, code.co_firstlineno]
        other = others.pop(0) if others else code
        # Not of a class, which has been made.
        if code.co_flags & inspect.CO_OPTIMIZED and bare(code) != bare(other):
            if code.co_freevars != other.co_freevars:  # functions that are there have other cells
                raise SystemExit(f"{code.co_name} cannot be given {other.co_freevars}")
            swaps[code] = other
    return swaps
