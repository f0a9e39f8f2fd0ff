# SPDX-License-Identifier: BSD-3-Clause
"""Launches in Triton's interpreter, in a third of the time."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any


def patch_language_once() -> None:
    """Let the interpreter put its functions into ``triton.language`` once, for good.

    It does so anew, and looks through all of the language, at each launch and whenever a kernel
    calls a function: most of the time. Versions that never put it back are left as they are.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None or not hasattr(interpreter, "_LangPatchScope") or patch.__module__ == __name__:
        return
    core, patched = interpreter.tl.core, set[bool]()

    def patch_once(function: Any) -> Any:
        has_core = any(value is core for value in function.__globals__.values())
        if has_core not in patched:
            patched.add(has_core)
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
