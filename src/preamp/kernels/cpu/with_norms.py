# SPDX-License-Identifier: BSD-3-Clause
"""The rules that need a norm of each tensor: those of the foreach back end, in small blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from preamp.kernels.cpu.sizes import small
from preamp.kernels.cpu.updates import is_skipped
from preamp.kernels.foreach.lamb import lamb_in_blocks, lamb_norms_in_blocks
from preamp.kernels.foreach.lars import lars_in_blocks
from preamp.kernels.foreach.novograd import novograd_in_blocks
from preamp.kernels.ops import Tensors
from preamp.kernels.rules import LambRule, Update


def _in_small_blocks(op: Callable[..., None]) -> Callable[..., None]:
    def update_(*lists: Tensors, rule: Any, update: Update) -> None:
        if not is_skipped(update):
            op(small(), *lists, rule=rule, update=update)

    return update_


lamb_ = _in_small_blocks(lamb_in_blocks)
"""See `preamp.kernels.ops.Ops.lamb_`."""

lars_ = _in_small_blocks(lars_in_blocks)
"""See `preamp.kernels.ops.Ops.lars_`."""

novograd_ = _in_small_blocks(novograd_in_blocks)
"""See `preamp.kernels.ops.Ops.novograd_`."""


def lamb_norms(*lists: Tensors, rule: LambRule, update: Update) -> torch.Tensor:
    """See `preamp.kernels.ops.Ops.lamb_norms`."""
    return lamb_norms_in_blocks(small(), *lists, rule=rule, update=update)
