# SPDX-License-Identifier: BSD-3-Clause
"""Arguments that are one of a few words."""

from __future__ import annotations

from preamp.core.errors import bad_value

_CHOICES = {
    "scope": {
        "thread": "casts hold in the whole thread",
        "model": "casts hold inside the models' forward only",
    },
    "overflow": {
        "skip": "the step is skipped and told",
        "trace": "modules are watched too, to tell the first to go wrong",
    },
}


def parse_choice(name: str, value: object) -> str:
    """Return ``value``, one of the words that argument ``name`` allows; raises `ValueError`."""
    if isinstance(value, str) and value in _CHOICES[name]:
        return value
    allowed = " and ".join(f"{choice!r} ({why})" for choice, why in _CHOICES[name].items())
    raise bad_value(
        f"{name}={value!r} is not known", f"Allowed are {allowed}", "Choose one of the two"
    )
