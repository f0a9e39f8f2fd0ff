# SPDX-License-Identifier: BSD-3-Clause
"""Packages that only parts of preamp need: the extras of ``pyproject.toml``."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """What to do where a package of an extra is missing. preamp is on no index yet."""
    return f"In a clone of preamp, run pip install '.[{extra}]'"
