# SPDX-License-Identifier: BSD-3-Clause
"""Numbers of bytes in words."""

from __future__ import annotations

from preamp.memory.estimates import MemoryEstimate


def bytes_text(count: int) -> str:
    """``1234567`` as ``"1.18 MiB"``."""
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
    unit = next(units)
    while value >= 1024 and unit != "EiB":
        value, unit = value / 1024, next(units)
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"


def storages_text(memory: MemoryEstimate) -> str:
    """What is kept from step to step, and with which storages it is less."""
    sizes = [f"{bytes_text(memory.total)} are kept"]
    for code, size in memory.smaller.items():
        rest = ", the rest on the host" if "place='host'" in code else ""
        sizes.append(f"{bytes_text(size)} with storage={code}{rest}")
    return f"At {memory.opt_level} {'; '.join(sizes)}."
