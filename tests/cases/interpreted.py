# SPDX-License-Identifier: BSD-3-Clause
"""Launches in Triton's interpreter, in less than half of the time."""

from __future__ import annotations

import importlib
from typing import Any


def patch_once_a_launch() -> None:
    """Let a launch put the interpreter's functions into ``triton.language`` once.

    It does so anew, and looks through all of the language, whenever a kernel calls a function: most
    of its time. Older versions, which do otherwise, stay as they are.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch, core, patched = interpreter._patch_lang, interpreter.tl.core, set[bool]()
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(patch, "unpatched"):
        return

    def patch_once(function: Any) -> Any:
        has_core = any(value is core for value in function.__globals__.values())
        if has_core in patched:
            return None  # only the first call of a launch, its kernel's, uses what it gets
        scope = patch(function)
        patched.add(has_core)
        if len(patched) == 1:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    patch_once.unpatched = patch  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once
