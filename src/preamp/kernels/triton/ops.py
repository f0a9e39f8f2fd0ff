# SPDX-License-Identifier: BSD-3-Clause
"""The back end: what the kernels of each op are started with, and what becomes of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, cast

import numpy as np
import torch

from preamp.kernels.ops import Census, Tensors
from preamp.kernels.plans import Plan, pick
from preamp.kernels.triton.device.elementwise import combine_kernel, convert_kernel
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.launch import PLAIN, check_devices, launch, moved, scalar, width_of
from preamp.kernels.triton.reductions import gather, measure
from preamp.kernels.triton.tables import CHUNK, table
from preamp.kernels.triton.works import Launch
from preamp.kernels.update import Scalar
from preamp.kernels.works import Combining

_vector_norm: Callable[..., torch.Tensor] = cast("Any", torch).linalg.vector_norm


def _put(total: torch.Tensor, positions: Sequence[int], values: torch.Tensor | None) -> None:
    if values is not None:
        for position, value in zip(positions, values.unbind(), strict=True):
            total[position] = value


class Triton(Combining):
    """Every op in Triton's kernels."""

    name = "triton"
    plain = PLAIN
    works = Launch

    def _check(self, devices: Set[torch.device]) -> None:
        check_devices(devices)

    # -- what is read and not written ------------------------------------------------------------

    @torch.no_grad()
    def census(self, grads: Tensors, device: torch.device, *, with_norm: bool = False) -> Census:
        plans, others = self._planned(grads)
        if not plans:
            return PLAIN.census(grads, device, with_norm=with_norm)
        # Whether any value is not finite, the largest magnitudes, and norms
        found = torch.zeros(1 + 2 * len(grads), dtype=torch.float32, device=plans[0].device)
        for plan in plans:
            entries = table(plan)
            partials = measure(entries, (0, plan.dtypes[0]), largest=True, squares=with_norm)
            gather(entries, partials[0], found[1:], largest=True, found_inf=found)
            if with_norm:
                gather(entries, partials[1], found[1 + len(grads) :], largest=False)
        found = found.to(device)
        max_abs, norms = found[1 : 1 + len(grads)], found[1 + len(grads) :]
        if others:
            own = pick(grads, others)
            rest = PLAIN.census(own, device)
            found[0] = torch.maximum(found[0], rest.found_inf)
            _put(max_abs, others, rest.max_abs)
            if with_norm:
                _put(norms, others, PLAIN.l2norms(own, None, device))
        return Census(found[0], _vector_norm(norms, 2) if with_norm else None, max_abs)

    @torch.no_grad()
    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        plans, others = self._planned(tensors)
        if not plans:
            return PLAIN.l2norms(tensors, factor, device)
        found = torch.zeros(len(tensors), dtype=torch.float32, device=plans[0].device)
        for plan in plans:
            entries, column = table(plan), (0, plan.dtypes[0])
            partials = measure(entries, column, largest=False, squares=True, factor=factor)
            gather(entries, partials, found, largest=False)
        found = found.to(device)
        if others:
            _put(found, others, PLAIN.l2norms(pick(tensors, others), factor, device))
        return found

    # -- scaling, adding, casting, splitting, joining ----------------------------------------------

    def _combine(
        self, plan: Plan, a: Scalar, b: Scalar = 1.0, factors: Sequence[torch.Tensor] = ()
    ) -> None:
        target, x, y = plan.dtypes
        at = plan.found
        if factors:
            near = [moved(factors[place].float(), plan.device) for place in plan.places]
            at = np.vstack([at, [factor.data_ptr() for factor in near]])
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
