# SPDX-License-Identifier: BSD-3-Clause
"""What preamp prints: plain lines on standard output, once per job."""

from __future__ import annotations

import torch


def is_first_rank() -> bool:
    """Whether this process speaks for the job: rank 0, or the only process there is."""
    group = torch.distributed
    if not (group.is_available() and group.is_initialized()):
        return True
    return group.get_rank() == 0


def say(text: str, *, every_rank: bool = False) -> None:
    """Print ``text``, on the first rank only unless ``every_rank``.

    Standard output, not ``logging``: scripts that moved here from Apex expect its lines there.
    """
    if every_rank or is_first_rank():
        print(text, flush=True)
