# SPDX-License-Identifier: BSD-3-Clause
"""Numbers and names as a reader sees them."""

from __future__ import annotations

import math
import unicodedata

MISSING = "–"
NAME_LIMIT = 72  # characters of a name that are shown; the middle of longer ones is left out
SENTENCE_LIMIT = 300  # characters of a sentence with words of a program's own

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that are invisible, reorder text around them, or cannot be written."""

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def shown(name: str, limit: int = NAME_LIMIT) -> str:
    """Make a name, maybe deceptive, fit to show: one line of ``limit``; not HTML yet."""
    # More than is shown of either end need not be looked at.
    ends = name if len(name) <= 2 * limit else f"{name[:limit]}…{name[-limit:]}"
    spelled = visible(ends)
    if len(spelled) <= limit:
        return spelled
    tail = (limit - 1) // 2
    return f"{spelled[: limit - 1 - tail]}…{spelled[len(spelled) - tail :]}"


def visible(text: str) -> str:
    """Spell what is invisible in a text, or cannot be written, as Python escapes it."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_spell(character) for character in text)


def _spell(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def counted(number: int, noun: str) -> str:
    """Write a number and its noun: ``"1 step"``, ``"2 steps"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def share(value: float) -> str:
    """Write a share between 0 and 1 in per cent; only nothing is 0, and only all is 100."""
    percent = 100 * value
    if math.isnan(percent):
        return MISSING
    if 0 < percent < 0.1:
        number = "<0.1"
    elif 99.9 < percent < 100:
        number = ">99.9"
    else:
        number = f"{percent:.{int(percent < 10 and percent != round(percent))}f}"
    return f"{number}\u00a0%"  # a space that no line ends at


def magnitude(value: float | None) -> str:
    """Write any number with three significant digits."""
    if value is None:
        return MISSING
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "−inf"
    return f"{value:.3g}".replace("-", "−")


def headroom(powers: float) -> str:
    """Write how many powers of two the largest value may grow by; infinite where all is zero."""
    return MISSING if math.isinf(powers) else f"{powers:.1f}"


def power(exponent: int) -> str:
    """Write a power of two: ``"2⁻¹⁴"``."""
    return f"2{str(exponent).translate(_RAISED)}"


def scale(value: float) -> str:
    """Write a loss scale: small whole numbers as they are, other powers of two as such."""
    if not (math.isfinite(value) and value > 0):
        return magnitude(value)
    mantissa, exponent = math.frexp(value)
    if mantissa != 0.5:
        return f"{value:,.6g}"
    if 1 <= value < 2**10:
        return f"{value:.0f}"
    return power(exponent - 1)


def size(count: float) -> str:
    """Write a number of bytes in the unit that leaves one to four digits."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    digits = 0 if unit == 0 or count >= 100 else 1
    return f"{count:,.{digits}f} {_UNITS[unit]}"
