# SPDX-License-Identifier: BSD-3-Clause
"""Patches that several engines want at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from preamp.casting.lock import PATCH_LOCK
from preamp.core.undo import Removable, UndoOnce
from preamp.kernels.scripting import forget_traced_names, know_traced_names

Builder = Callable[[], Removable]


class SharedInstall:
    """Patches that are on while anybody holds them."""

    def __init__(self, build: Callable[[], list[Removable]]) -> None:
        self._build = build
        self._holders = 0
        self._handles: list[Removable] = []
        self._extras: dict[Hashable, Builder] = {}
        self._extra_handles: dict[Hashable, Removable] = {}
        self._compiler_knows = False

    @property
    def is_installed(self) -> bool:
        """Whether anybody holds the patches now."""
        return self._holders > 0

    def acquire(self) -> Removable:
        """Hold the patches; the first holder installs them, the last one removes them."""
        with PATCH_LOCK:
            if not self._holders:
                self._install()
            self._holders += 1
        return UndoOnce(self._release)

    def _install(self) -> None:
        self._compiler_knows = know_traced_names()
        self._handles = self._build()
        try:
            for key, make in self._extras.items():
                self._extra_handles[key] = make()
        except BaseException:
            self._remove_all()
            raise

    def _remove_all(self) -> None:
        for handle in (*self._extra_handles.values(), *self._handles):
            handle.remove()
        self._extra_handles, self._handles = {}, []
        if not self._compiler_knows:
            forget_traced_names()

    def _release(self) -> None:
        with PATCH_LOCK:
            self._holders -= 1
            if not self._holders:
                self._remove_all()

    def extend(self, key: Hashable, build: Builder) -> None:
        """Add a patch to this and all later installations; a known ``key`` is replaced."""
        with PATCH_LOCK:
            self._extras[key] = build
            if self._holders:
                known = self._extra_handles.pop(key, None)
                if known is not None:
                    known.remove()
                self._extra_handles[key] = build()

    def discard(self, key: Hashable) -> None:
        """Forget what ``extend`` added under ``key``."""
        with PATCH_LOCK:
            self._extras.pop(key, None)
            known = self._extra_handles.pop(key, None)
            if known is not None:
                known.remove()
