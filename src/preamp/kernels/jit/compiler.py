# SPDX-License-Identifier: BSD-3-Clause
# pyright: reportMissingTypeStubs=false
"""How functions are compiled, and where the machine code is kept between processes.

numba compiles at the first call with new dtypes and rules. It would keep code by the path of the
source, and look at changes of that file alone; here the folder's name has a digest of all sources
that kernels are made of, and of the versions of numba and Python. So copies of the package share
their code where they are alike, and only there. Where nothing can be written each process compiles
for itself.

Files are unpickled, which runs what is in them. So a file counts only if it is the user's or
root's, and nobody else may write to it; any other is as if it were not there.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core import caching, serialize
from numba.core.compiler import CompileResult

_numba: Any = numba
_NullCache: Any = caching.NullCache
_serialize: Any = serialize
_CompileResult: Any = CompileResult

# Results are those of each operation rounded on its own: no fused products, no order but the
# written one, subnormals and signs of zeros kept. Sums that may be taken in any order say so where
# they stand, see `preamp.kernels.jit.words.add`.
_OPTIONS = {"error_model": "numpy", "nogil": True, "fastmath": False}

ALWAYS_INLINE = {"forceinline": True, "error_model": "numpy"}
"""For what numba's ``overload`` chooses by type."""


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
    """The user's folder for this version's code; ``None`` where nothing can be written."""
    user = 0 if sys.platform == "win32" else os.geteuid()
    digest = hashlib.sha256(f"{user} {_numba.__version__} {sys.version_info[:2]}".encode())
    here = Path(__file__).parent
    beside = [here.parent / name for name in ("stored.py", "rules.py")]
    for file in (*beside, *sorted(here.glob("*.py"))):
        if file.name != "ops.py":  # which starts kernels, and is no part of any
            digest.update(file.read_bytes())
    try:
        folder = (cache_folder() / f"jit-{digest.hexdigest()[:16]}").resolve()
        for place in (*reversed(folder.parents), folder):
            place.mkdir(0o777 if sys.platform == "win32" else 0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except (OSError, RuntimeError):  # there may be no home either
        return None


def _own_content(file: Path) -> bytes | None:
    """What is in a file that only the user and root can have written; ``None`` of any other.

    It has this name alone: a link may lead to what the user has downloaded. The open file is asked,
    which nobody can exchange. Windows has no such permissions; its folders for users are private.
    """
    if sys.platform == "win32":
        return file.read_bytes()
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        status = os.fstat(opened.fileno())
        is_own = status.st_uid in (0, os.geteuid()) and status.st_nlink == 1
        is_closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return opened.read() if stat.S_ISREG(status.st_mode) and is_own and is_closed else None


class _Kept(_NullCache):
    """What numba asks for machine code of a kernel before it compiles, and gives it to afterwards.

    The code for one list of types and one processor is a file by itself, replaced as a whole: any
    number of processes may compile at once. What is damaged or cannot be written is compiled again.
    """

    def __init__(self, body: Callable[..., Any], folder: str) -> None:
        code = body.__code__
        self._name = f"{body.__module__}.{code.co_name}"
        # Sources of the package are in the folder's name, those of other kernels are not.
        self._code = repr((code.co_code, code.co_consts, code.co_names))
        self._folder = Path(folder)

    @property
    def cache_path(self) -> str:
        return str(self._folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        key = self._key(sig, target_context.codegen())
        try:
            content = _own_content(self._file(key)) or b""
        except OSError:
            return None
        digest, pickled = content[:32], content[32:]
        if hashlib.sha256(pickled).digest() != digest:
            return None
        kept, parts = pickle.loads(pickled)
        return _CompileResult._rebuild(target_context, *parts) if kept == key else None

    def save_overload(self, sig: Any, cres: Any) -> None:
        if cres.library.has_dynamic_globals:  # addresses, which are of this process alone
            return
        key = self._key(sig, cres.codegen)
        pickled = _serialize.dumps((key, cres._reduce()))
        with suppress(OSError):
            handle, draft = tempfile.mkstemp(".tmp", dir=self._folder)  # for the user alone
            try:
                with open(handle, "wb") as opened:
                    opened.write(hashlib.sha256(pickled).digest() + pickled)
                os.replace(draft, self._file(key))
            finally:
                Path(draft).unlink(missing_ok=True)

    def _key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        return signature, codegen.magic_tuple(), self._code

    def _file(self, key: tuple[Any, ...]) -> Path:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()
        return self._folder / f"{self._name}-{digest[:24]}.code"


def kernel(body: Callable[..., Any]) -> Any:
    """Compile ``body`` when it is called with new types, or take what was compiled before."""
    compiled, folder = _numba.njit(**_OPTIONS)(body), _folder()
    if folder is not None and body.__closure__ is None:  # which nothing would tell from another
        compiled._cache = _Kept(body, folder)
    return compiled


def function(body: Callable[..., Any]) -> Any:
    """Compile ``body`` once for each kernel that calls it."""
    return _numba.njit(**_OPTIONS)(body)


def part(body: Callable[..., Any]) -> Any:
    """Compile ``body`` into each place that calls it."""
    return _numba.njit(forceinline=True, **_OPTIONS)(body)
