# SPDX-License-Identifier: BSD-3-Clause
"""What the update rules share on the host: sorting, common arguments, what is left over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels.ops import Tensors
from preamp.kernels.rules import Update
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.launch import check_devices, given, launch, number, scalar
from preamp.kernels.triton.places import pick, sort
from preamp.kernels.triton.reductions import gathered, measure
from preamp.kernels.triton.tables import CHUNK, Table, table


@dataclass(frozen=True, slots=True)
class Places:
    """Places of an update that one launch takes.

    Attributes:
        entries: Rows: parameters, gradients, state, and halves if there are any.
        dtypes: By the names that kernels know: ``P`` and ``G``, ``M`` and ``V`` for the state,
            ``H`` for the halves or ``None``, ``N`` for 0-dim state.
        math: That of the computation.
        update: As given.
        written: The tensors that change.
    """

    entries: Table
    dtypes: dict[str, torch.dtype | None]
    math: torch.dtype
    update: Update
    written: list[torch.Tensor]

    def numbers(self, **values: float) -> dict[str, int]:
        """Keyword arguments: the bits of each value."""
        return {name: number(value, self.math) for name, value in values.items()}

    def empty(self, *shape: int) -> torch.Tensor:
        """Room for intermediate results."""
        return torch.empty(shape, dtype=self.math, device=self.entries.layout.device)

    def corrections(self, wanted: bool, **betas: float) -> dict[str, Any]:
        """Keyword arguments for the kernel's ``correction``, and ``STEP_AT``."""
        step = self.update.step
        arguments = scalar("step", step, self.entries, self.math)
        on_device = arguments["STEP_AT"]
        for name, beta in betas.items():
            if not wanted:
                beta = 0.0  # no correction: 1 - 0 is 1
            if on_device:
                value = math.log(beta) if beta > 0 else -math.inf
            else:
                value = 1.0 - beta ** cast("int", step)
            arguments[name] = number(value, self.math)
        return arguments

    def given_norms(self) -> torch.Tensor | None:
        """``update.norms``, if the rule has been told them."""
        norms = self.update.norms
        return None if norms is None else norms.to(self.math).contiguous()

    def norms(self, name: str, factor: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of each parameter (``P``) or gradient (``G``), times ``factor``."""
        return self._measured(name, factor, largest=False)

    def max_norms(self, name: str, factor: torch.Tensor | None = None) -> torch.Tensor:
        """Return the largest magnitudes, like `norms`."""
        return self._measured(name, factor, largest=True)

    def _measured(self, name: str, factor: torch.Tensor | None, largest: bool) -> torch.Tensor:
        dtypes = (cast("torch.dtype", self.dtypes[name]), self.math)
        partials = measure(
            self.entries,
            "PG".index(name),
            dtypes,
            largest=largest,
            squares=not largest,
            factor=factor,
        )
        return gathered(self.entries, partials[0], largest=largest)

    def launch(self, kernel: Any, **arguments: Any) -> None:
        """Start an update kernel with what all of them take, and note what it wrote."""
        launch(
            kernel,
            (self.entries.chunks,),
            self.entries,
            **given("inv_scale", self.update.inv_scale, self.entries),
            **given("found_inf", self.update.found_inf, self.entries),
            **{name: KINDS[dtype] for name, dtype in self.dtypes.items() if name != "N"},
            MATH=KINDS[self.math],
            CHUNK=CHUNK,
            **arguments,
        )
        torch.autograd.graph.increment_version(self.written)


def places(
    params: Tensors, grads: Tensors, *state: Tensors, update: Update, norms: Tensors | None = None
) -> tuple[list[Places], list[int]]:
    """Sort the lists into launches, and name the places that only the reference can take.

    Args:
        params: As the op was given them, like the other lists.
        grads: Same.
        state: Lists of the parameters' shapes.
        update: As given.
        norms: State of 0-dim tensors; the last row of the table.
    """
    check_devices(params)
    halves: Sequence[torch.Tensor | None] = update.halves or [None] * len(params)
    scalars = [] if norms is None else [norms]
    groups, others = sort(params, grads, *state, halves, *scalars, scalars=len(scalars))
    names = ("P", "G", *"MV"[: len(state)], "H", *"N"[: len(scalars)])
    return [
        Places(
            entries=table([row for row in group.rows if row], range(len(group.positions))),
            dtypes=dict(zip(names, group.dtypes, strict=True)),
            math=math_dtype(cast("torch.dtype", group.dtypes[0])),
            update=update if update.norms is None else update.at(group.positions),
            written=[t for i, row in enumerate(group.rows) if i != 1 for t in row],
        )
        for group in groups
    ], others


def leave(
    op: Callable[..., None], positions: Sequence[int], *lists: Tensors, rule: Any, update: Update
) -> None:
    """Let the reference's ``op`` update the places at ``positions``."""
    if positions:
        op(*[pick(row, positions) for row in lists], rule=rule, update=update.at(positions))
