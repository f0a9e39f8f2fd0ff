# SPDX-License-Identifier: BSD-3-Clause
"""What a single process has to know about there being others. Nothing is communicated here."""

from __future__ import annotations

import torch.distributed as dist


def has_process_group() -> bool:
    """Whether ``torch.distributed`` is initialized, and gradients may thus be reduced by hooks."""
    return dist.is_available() and dist.is_initialized()


def is_first_rank() -> bool:
    """Whether this process speaks for the job: rank 0, or the only process there is."""
    return not has_process_group() or dist.get_rank() == 0
