# SPDX-License-Identifier: BSD-3-Clause
"""What preamp prints: plain lines on standard output, once per job."""

from __future__ import annotations

from preamp.core.ranks import is_first_rank


def say(text: str, *, every_rank: bool = False) -> None:
    """Print, on the first rank unless ``every_rank``; not logged, as scripts for Apex expect."""
    if every_rank or is_first_rank():
        print(text, flush=True)
