# SPDX-License-Identifier: BSD-3-Clause
"""What ranks that hold parts of one model tell each other about its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from preamp.core.splits import Splits
from preamp.kernels import Census

Tensors = Sequence[torch.Tensor]


def of_all_ranks(census: Census, params: Tensors, with_grad: Tensors, splits: Splits) -> Census:
    """Return ``census`` as it is of all ranks that hold parts of the same parameters.

    Overflow and norm travel in one vector of two numbers, so every census costs one all-reduce
    for each process group that parameters are split over: one with ``fully_shard``. Where no
    parameter is split nothing is sent. Does not wait for the device.

    What it tells of single tensors stays that of this rank. ``params`` are all that might have
    had a gradient.
    """
    if not splits.concern(params) or not (with_grad or splits.given):
        return census
    over = map(splits.of, params)
    vectors, groups = [census.found_inf.double().reshape(1)], [splits.every(over)]
    kinds = set(map(splits.of, with_grad))
    # Else each kind has a sum of its own, and ranks may differ in what kinds they have.
    norm = census.norm if len(kinds) == 1 and not splits.given else None
    if norm is not None:
        vectors.append(norm.double().square().reshape(1))
        groups.append(kinds.pop())
    splits.sum_(vectors, groups)
    return replace(
        census,
        found_inf=(vectors[0] != 0).to(census.found_inf.dtype).reshape(()),
        norm=None if norm is None else vectors[1].sqrt().to(norm.dtype).reshape(()),
    )
