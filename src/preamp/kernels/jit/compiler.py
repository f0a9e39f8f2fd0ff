# SPDX-License-Identifier: BSD-3-Clause
# pyright: reportMissingTypeStubs=false
"""How functions are compiled, and where the machine code is kept between processes.

numba compiles at the first call with new dtypes and rules. Its own index of what is on the disk
knows the processor and the version of numba, and of the sources only the file that a kernel stands
in; so the folder's name has a digest of all of them. Files are replaced as a whole, which lets any
number of processes compile at once. Where nothing can be written each process compiles for itself.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

_numba: Any = numba
_config: Any = _numba.config

# Results are those of each operation rounded on its own: no fused products, no order but the
# written one, subnormals and signs of zeros kept. Sums that may be taken in any order say so where
# they stand, see `preamp.kernels.jit.words.add`.
_OPTIONS = {"error_model": "numpy", "nogil": True, "fastmath": False}

ALWAYS_INLINE = {"forceinline": True, "error_model": "numpy"}
"""For what numba's ``overload`` chooses by type."""


FP16 = os.environ.get("PREAMP_JIT_FP16", "")
"""``"integer"`` says that the processor has no instructions for float16."""


def cache_folder() -> Path:
    """Where machine code is kept: ``PREAMP_CACHE``, or ``preamp`` in the user's cache folder."""
    given = os.environ.get("PREAMP_CACHE")
    if given:
        return Path(given)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or tempfile.gettempdir()
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "preamp"


@functools.cache
def _folder() -> str | None:
    """The folder of this version's code, made if need be; ``None`` if it cannot be written to."""
    digest = hashlib.sha256(_numba.__version__.encode() + FP16.encode())
    here = Path(__file__).parent
    beside = [here.parent / name for name in ("ops.py", "stored.py")]  # kernels know their numbers
    for file in (*beside, *sorted(here.glob("*.py"))):
        digest.update(file.read_bytes())
    try:
        folder = cache_folder() / f"jit-{digest.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except (OSError, RuntimeError):  # there may be no home either
        return None


def kernel(body: Callable[..., Any]) -> Any:
    """Compile ``body`` when it is called with new types, or take what was compiled before."""
    folder, before = _folder(), _config.CACHE_DIR
    # numba reads the folder when a function is decorated; the user's own functions keep theirs.
    _config.CACHE_DIR = folder or before
    try:
        return _numba.njit(cache=folder is not None, **_OPTIONS)(body)
    finally:
        _config.CACHE_DIR = before


def function(body: Callable[..., Any]) -> Any:
    """Compile ``body`` once for each kernel that calls it."""
    return _numba.njit(**_OPTIONS)(body)


def part(body: Callable[..., Any]) -> Any:
    """Compile ``body`` into each place that calls it."""
    return _numba.njit(forceinline=True, **_OPTIONS)(body)
