# SPDX-License-Identifier: BSD-3-Clause
"""What ranks that hold parts of one model tell each other about its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from preamp.core.splits import Splits
from preamp.kernels import Census, Ops
from preamp.optim.rank_norms import norm_of_order, total_norm

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Means:
    """What an engine works with."""

    ops: Ops
    splits: Splits = field(default_factory=Splits)  # over which ranks parameters are split


class JointFindings:
    """Makes the findings of one rank those of all that hold parts of the same parameters.

    Overflow and norm travel in one vector of two numbers, so every census costs one all-reduce
    for each process group that parameters are split over: one with ``fully_shard``. Where no
    parameter is split nothing is sent.
    """

    def __init__(self, splits: Splits) -> None:
        """Ask ``splits`` what is split."""
        self.splits = splits

    def on(self, census: Census, params: Tensors, with_grad: Tensors) -> Census:
        """Return ``census`` as it is of all ranks together. Does not wait for the device.

        What it tells of single tensors stays that of this rank. ``params`` are all that might have
        had a gradient.
        """
        splits = self.splits
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

    def norm(
        self,
        ops: Ops,
        grads: Tensors,
        factors: Sequence[torch.Tensor | None],
        params: Tensors,
        device: torch.device,
    ) -> torch.Tensor:
        """Return the L2 norm over all ``grad * factor``, a float32 scalar on ``device``."""
        return total_norm(ops, grads, factors, params, self.splits, device).float()

    def norm_of_order(
        self, grads: Tensors, order: float, params: Tensors, device: torch.device
    ) -> torch.Tensor:
        """Return the norm of another order."""
        return norm_of_order(grads, order, params, self.splits, device)
