# SPDX-License-Identifier: BSD-3-Clause
"""Versions of what a checkpoint contains, and how to get from each to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

VERSION = 1
"""Of what is written. It changes when content would be misunderstood, not when some is added."""

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""For each older version, what makes its content that of the next one."""


def migrated(content: Any, version: int) -> dict[str, Any]:
    """Bring ``content`` to the current version; `ValueError` if its own is newer, or none."""
    if not isinstance(content, dict):
        raise ValueError("its content is of another kind")
    migrated_content = cast("dict[str, Any]", content)
    known = (*MIGRATIONS, VERSION)
    if version not in known:
        newer = ", which a newer preamp has written" if version > VERSION else ""
        raise ValueError(f"it has version {version}{newer}; versions {known} are known")
    for step in range(version, VERSION):
        migrated_content = MIGRATIONS[step](migrated_content)
    return migrated_content
