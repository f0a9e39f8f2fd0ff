# SPDX-License-Identifier: BSD-3-Clause
"""Adagrad."""

from __future__ import annotations

import torch

from preamp.kernels import reference
from preamp.kernels.ops import Tensors
from preamp.kernels.rules import AdagradRule, Update
from preamp.kernels.triton.device.adagrad import adagrad_kernel
from preamp.kernels.triton.launch import scalar
from preamp.kernels.triton.update import leave, places


@torch.no_grad()
def adagrad_(
    params: Tensors, grads: Tensors, sums: Tensors, *, rule: AdagradRule, update: Update
) -> None:
    """See `preamp.kernels.ops.Ops.adagrad_`."""
    taken, others = places(params, grads, sums, update=update)
    for part in taken:
        part.launch(
            adagrad_kernel,
            **scalar("lr", rule.lr, part.entries, part.math),
            **part.numbers(eps=rule.eps, weight_decay=rule.weight_decay),
            DECAYS=rule.weight_decay != 0,
            DECOUPLED=rule.decoupled,
        )
    leave(reference.adagrad_, others, params, grads, sums, rule=rule, update=update)
