# SPDX-License-Identifier: BSD-3-Clause
"""Factories named in text: ``"package.module:name(10, bias=False)"``."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from preamp.core.errors import message

_FORM = (
    "A factory is written package.module:name, or package.module:name(10, bias=False) with "
    "numbers, strings, True, False, None, and lists, tuples and dicts of them as arguments"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function by its place, and what to call it with.

    Attributes:
        module: Dotted module; empty where the text named none.
        name: Dotted name inside of it.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    module: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    def import_function(self) -> Callable[..., Any]:
        """Import the module and return the function in it.

        Raises `ValueError` if the text named no module, or there is no such module or name, or it
        cannot be called.
        """
        if not self.module:
            raise _malformed(self.name)
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                message(
                    f"Cannot import {self.module}:{self.name}: {error}",
                    _FORM,
                    "Check the spelling, and that the module is on PYTHONPATH",
                )
            ) from error
        if not callable(found):
            raise ValueError(
                message(f"{self.module}:{self.name} cannot be called", _FORM, "Name a function")
            )
        return found


def parse_call(text: str) -> Call:
    """Read a factory and its arguments; nothing is imported or run.

    Such as ``"torch.nn:Linear(10, 20, bias=False)"`` or ``"AdamW(lr=1e-3)"``. Raises `ValueError`
    for another form, or an argument that is no literal.
    """
    place, bracket, rest = text.strip().partition("(")
    module, _, name = place.rpartition(":")
    if not all(part.isidentifier() for part in (*name.split("."), *module.split(".")) if part):
        raise _malformed(text)
    if not name or (bracket and not rest.endswith(")")):
        raise _malformed(text)
    if not bracket:
        return Call(module=module, name=name)
    try:
        node = ast.parse(f"f({rest}", mode="eval").body
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise _malformed(text)
        args = tuple(ast.literal_eval(item) for item in node.args)
        kwargs = {str(item.arg): ast.literal_eval(item.value) for item in node.keywords if item.arg}
    except (SyntaxError, ValueError) as error:
        raise _malformed(text) from error
    if len(kwargs) != len(node.keywords):
        raise _malformed(text)
    return Call(module=module, name=name, args=args, kwargs=kwargs)


def _malformed(text: str) -> ValueError:
    return ValueError(
        message(
            f"{text!r} does not name a factory",
            _FORM,
            'Write for example "torch.nn:Linear(10, 20)"',
        )
    )
