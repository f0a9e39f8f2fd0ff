# SPDX-License-Identifier: BSD-3-Clause
"""Launches in Triton's interpreter, in a third of the time."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any


def patch_language_once() -> None:
    """Let the interpreter put its functions into ``triton.language`` once, for good.

    It does so anew, and looks through all of the language, at each launch and whenever a kernel
    calls a function: most of the time. Older versions, which do otherwise, stay as they are.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch, core, patched = interpreter._patch_lang, interpreter.tl.core, set[bool]()
    if not hasattr(interpreter, "_LangPatchScope") or patch.__module__ == __name__:
        return

    def patch_once(function: Any) -> Any:
        has_core = any(value is core for value in function.__globals__.values())
        if has_core not in patched:
            patched.add(has_core)
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
