# SPDX-License-Identifier: BSD-3-Clause
"""How large blocks are."""

name = "foreach"

BLOCK = 1 << 24
"""Elements of a block: enough to keep any device busy, few enough for its temporaries."""


def elements() -> int:
    """`BLOCK`, as it is at the moment; tests cut smaller ones."""
    return BLOCK
