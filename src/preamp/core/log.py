# SPDX-License-Identifier: BSD-3-Clause
"""What preamp prints: plain lines on standard output, once per job."""

from __future__ import annotations

from preamp.core.ranks import is_first_rank


def say(text: str, *, every_rank: bool = False) -> None:
    """Print ``text``, on the first rank only unless ``every_rank``.

    Standard output, not ``logging``: scripts that moved here from Apex expect its lines there.
    """
    if every_rank or is_first_rank():
        print(text, flush=True)
