# SPDX-License-Identifier: BSD-3-Clause
"""What the kernels of linear combinations, and of splitting and joining, are started with."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch

from preamp.kernels.ops import Column
from preamp.kernels.plans import Plan
from preamp.kernels.triton.device.elementwise import combine_kernel, convert_kernel
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.launch import PLAIN, launch, moved, planned_here, scalar, width_of
from preamp.kernels.triton.tables import CHUNK, table
from preamp.kernels.update import Scalar
from preamp.kernels.works import Combining


class Elementwise(Combining):
    """Scaling, adding, casting, splitting and joining."""

    plain = PLAIN

    def _planned(
        self, *lists: Column, codes: Set[torch.dtype] = frozenset()
    ) -> tuple[list[Plan], list[int]]:
        return planned_here(*lists, codes=codes)

    def _combine(
        self, plan: Plan, a: Scalar, b: Scalar = 1.0, factors: Sequence[torch.Tensor] = ()
    ) -> None:
        target, x, y = plan.dtypes
        moved_factors = [moved(factors[i].float(), plan.device) for i in plan.places if factors]
        at = plan.found
        if factors:
            at = np.vstack([at, [factor.data_ptr() for factor in moved_factors]])
        entries = table(plan, at)
        launch(
            combine_kernel,
            (entries.chunks,),
            entries,
            **scalar("a", a, entries),
            **scalar("b", b, entries),
            T=KINDS[target],
            X=KINDS[x],
            Y=KINDS[y],
            A_EACH=(2 if y is None else 3) if factors else 0,
            CHUNK=CHUNK,
            WIDTH=width_of(target),
        )
        torch.autograd.graph.increment_version(plan.rows[0])

    def _take_over(self, plan: Plan) -> None:
        p, half = plan.dtypes
        self._converted(plan, [0], P=KINDS[p], H=KINDS[half], HOW=2, WIDTH=width_of(p))

    def _convert(self, plan: Plan, *, joins: bool) -> None:
        wide, half, low = plan.dtypes
        width = width_of(wide if joins else half)
        written = [0] if joins else [1, 2]
        self._converted(plan, written, P=KINDS[half], H=KINDS[low], HOW=int(joins), WIDTH=width)

    def _converted(self, plan: Plan, written: Sequence[int], **told: Any) -> None:
        entries = table(plan)
        launch(convert_kernel, (entries.chunks,), entries, CHUNK=CHUNK, **told)
        for row in written:
            torch.autograd.graph.increment_version(plan.rows[row])
