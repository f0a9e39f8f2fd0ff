# SPDX-License-Identifier: BSD-3-Clause
"""One launch of an update as kernels take it: its tables, and what all of them are told."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch

from preamp.kernels.stored import BLOCK as SLOTS
from preamp.kernels.stored import Format, scales_shape
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.launch import (
    check_devices,
    given,
    launch,
    moved,
    number,
    scalar,
    width_of,
)
from preamp.kernels.triton.reductions import gathered, measure
from preamp.kernels.triton.tables import CHUNK, table
from preamp.kernels.works import Work


class Launch(Work):
    """A work with its tables; halves and lows are one list for kernels, called ``H``."""

    __slots__ = ("entries", "kinds", "plain", "told")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        check_devices([self.plan.device])
        dtypes = {name: self.dtypes.get(name) for name in "PGMVN"}
        dtypes["H"] = self.dtypes["H"] or self.dtypes["L"]
        self.kinds = {name: KINDS[dtype] for name, dtype in dtypes.items()}
        for name, kind in zip(self.states, self.formats, strict=True):
            if kind is Format.BFLOAT16:
                self.kinds[name] = KINDS[torch.int16]  # as kernels call it
        # Rows: parameters, gradients, state, halves if there are any, numbers if the rule has some
        self.entries = self.plain = table(self.plan, in_order=True)
        step, by_chance = self.update.step, self.by_chance
        turn_at = None
        if by_chance and isinstance(step, torch.Tensor):
            step, turn_at = 0, moved(step, self.plan.device)
        self.told: dict[str, Any] = {  # of lists that are kept in fewer bits
            "KEPT": sum(map(bool, self.plan.rows)),
            "CHANCE": by_chance,
            "IN_BLOCKS": self.in_blocks,
            "seed": self.stored.seed if by_chance else 0,
            "turn": step if by_chance else 0,
            "turn_at": self.plain.layout if turn_at is None else turn_at,
            "TURN_AT": turn_at is not None,
        }
        if by_chance:
            self._keep()

    def _keep(self) -> None:
        """Have a table with scales of both lists, numbers, starts, and lengths of rows behind."""
        plan = self.plan
        rows = [n for n, name in enumerate(self.names) if name not in "ST" and plan.rows[n]]
        scales = np.zeros((2, len(plan.places)), np.int64)
        own = plan.at[len(self.names) - sum([name in "ST" for name in self.names]) :]
        scales[: len(own)] = own
        shapes = [tensor.shape for tensor in self.rows("P")]
        behind = [*self.numbers_and_starts(), [math.prod(shape[1:]) for shape in shapes]]
        sizes = None
        if self.in_blocks:
            sizes = [math.prod(scales_shape(shape)) * SLOTS for shape in shapes]
        at = np.concatenate([plan.at[rows], scales, np.asarray(behind, np.int64)])
        self.told["KEPT"] = len(rows)
        self.entries = table(plan, at, sizes, in_order=True)

    def empty(self, *shape: int) -> torch.Tensor:
        """Room for intermediate results."""
        return torch.empty(shape, dtype=torch.float32, device=self.plan.device)

    def corrections(self, wanted: bool, **betas: float) -> dict[str, Any]:
        """Keyword arguments for the kernel's ``correction``, and ``STEP_AT``."""
        step = self.update.step
        arguments = scalar("step", step, self.entries)
        on_device = arguments["STEP_AT"]
        for name, beta in betas.items():
            if not wanted:
                beta = 0.0  # no correction: 1 - 0 is 1
            if on_device:
                value = math.log(beta) if beta > 0 else -math.inf
            else:
                value = 1.0 - beta ** cast("int", step)
            arguments[name] = number(value)
        return arguments

    def measured(
        self, name: str, factor: torch.Tensor | None = None, *, largest: bool = False
    ) -> torch.Tensor:
        """Norm or largest magnitude of each parameter (``P``) or gradient (``G``) × ``factor``."""
        low, half = self.dtypes["L"], self.dtypes["H"]
        is_told = name == "P" and (self.leads or low is not None)
        partials = measure(
            self.plain,
            ("PG".index(name), self.dtypes[name]),
            beside=(self.half_row, low or half) if is_told else (0, None),
            largest=largest,
            squares=not largest,
            factor=factor,
        )
        return gathered(self.plain, partials[0], largest=largest)

    @property
    def half_row(self) -> int:
        """In which row of addresses halves are."""
        return 2 + len(self.states)

    def start(self, kernel: Any, **arguments: Any) -> None:
        """Start an update kernel with what all of them take, and note what it wrote."""
        launch(
            kernel,
            (self.entries.chunks,),
            self.entries,
            **given("inv_scale", self.update.inv_scale, self.entries),
            **given("found_inf", self.update.found_inf, self.entries),
            **{name: self.kinds[name] for name in "PGMVH"},
            H_ROW=self.half_row,
            LEADS=self.leads,
            CHUNK=CHUNK,
            WIDTH=width_of(*[self.dtypes.get(name) for name in "PMV"]),
            **(self.told | arguments),
        )
        self.note_written()
