# SPDX-License-Identifier: BSD-3-Clause
"""The lists of an update as kernels take them: sorted into launches, each with its table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.places import STORED_DTYPES, Group, pick, sort
from preamp.kernels.stored import BLOCK as SLOTS
from preamp.kernels.stored import Format, Stored, lead, scales_shape
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
from preamp.kernels.triton.tables import CHUNK, Table, sizes_of, table
from preamp.kernels.update import Update


@dataclass(frozen=True, slots=True)
class Places:
    """Places of an update that one launch takes."""

    entries: Table  # rows: parameters, gradients, state, and halves if there are any
    # by the names that kernels know: ``P`` and ``G``, ``M`` and ``V`` for the state, ``H`` for
    # the halves or ``None``, ``N`` for 0-dim state
    dtypes: dict[str, torch.dtype | None]
    update: Update  # as given
    written: list[torch.Tensor]  # the tensors that change
    kept: dict[str, Any]  # what kernels are told of lists that are kept in fewer bits
    # as ``entries``, without what is kept, and cut by elements
    plain: Table

    def numbers(self, **values: float) -> dict[str, int]:
        """Keyword arguments: the bits of each value."""
        return {name: number(value) for name, value in values.items()}

    def empty(self, *shape: int) -> torch.Tensor:
        """Room for intermediate results."""
        return torch.empty(shape, dtype=torch.float32, device=self.entries.layout.device)

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

    @property
    def leads(self) -> bool:
        """Whether there are half weights, which parameters refine."""
        half = self.dtypes["H"]
        return (
            half is not None
            and self.update.halves_lead
            and lead(cast("torch.dtype", self.dtypes["P"]), half)
        )

    def given_norms(self) -> torch.Tensor | None:
        """``update.norms``, if the rule has been told them."""
        norms = self.update.norms
        return None if norms is None else norms.float().contiguous()

    def norms(
        self, name: str, factor: torch.Tensor | None = None, *, largest: bool = False
    ) -> torch.Tensor:
        """Norm or largest magnitude of each parameter (``P``) or gradient (``G``) × ``factor``."""
        is_told = name == "P" and (self.leads or self.dtypes["H"] is torch.int16)
        partials = measure(
            self.plain,
            ("PG".index(name), self.dtypes[name]),
            beside=(3 + ("V" in self.dtypes), self.dtypes["H"]) if is_told else (0, None),
            largest=largest,
            squares=not largest,
            factor=factor,
        )
        return gathered(self.plain, partials[0], largest=largest)

    def launch(self, kernel: Any, **arguments: Any) -> None:
        """Start an update kernel with what all of them take, and note what it wrote."""
        launch(
            kernel,
            (self.entries.chunks,),
            self.entries,
            **given("inv_scale", self.update.inv_scale, self.entries),
            **given("found_inf", self.update.found_inf, self.entries),
            **{name: KINDS[dtype] for name, dtype in self.dtypes.items() if name != "N"},
            LEADS=self.leads,
            CHUNK=CHUNK,
            WIDTH=width_of(*[self.dtypes.get(name) for name in "PMV"]),
            **(self.kept | arguments),
        )
        torch.autograd.graph.increment_version(self.written)


def places(
    params: Tensors,
    grads: Tensors,
    *state: Tensors,
    update: Update,
    numbers: Sequence[Tensors] = (),
) -> tuple[list[Places], list[int]]:
    """Sort lists, ``numbers`` last, into launches, and name what no kernel can take."""
    check_devices(params)
    stored = update.stored or Stored()
    nothing: list[None] = [None] * len(params)
    lows = update.halves if stored.lows is None else stored.lows
    scales = [row or nothing for row in stored.scales[: len(state)]]
    groups, others = sort(
        *(params, grads, *state, lows or nothing, *numbers, *scales),
        scalars=len(numbers) + len(scales),
        codes=frozenset() if update.stored is None else STORED_DTYPES,
        in_order=any([kind is not Format.PLAIN for kind in stored.formats]),
    )
    names = ("P", "G", *"MV"[: len(state)], "H", *"N"[: len(numbers)])
    return [_places_of(group, names, update) for group in groups], others


def _places_of(group: Group, names: Sequence[str], update: Update) -> Places:
    stored = update.stored or Stored()
    shaped = group.rows[: len(names)]
    rows = [row for row in shaped if row]
    positions = range(len(group.positions))
    dtypes = dict(zip(names, group.dtypes, strict=False))
    for name, kind in zip("MV", stored.formats, strict=False):
        if kind is Format.BFLOAT16:
            dtypes[name] = torch.int16  # as kernels call it
    kept = {"KEPT": len(rows), "CHANCE": False, "IN_BLOCKS": False, "turn": 0, "seed": 0}
    entries = plain = table(rows, positions, sizes=sizes_of(group))
    turn: dict[str, Any] = {"turn_at": plain.layout, "TURN_AT": False}
    if any([kind is not Format.PLAIN for kind in stored.formats]):
        kept["CHANCE"], kept["seed"] = True, stored.seed
        kept["IN_BLOCKS"] = any([kind.has_scales for kind in stored.formats])
        entries = _kept_table(group, rows, names, stored)
        turn = _turn(update.step, entries)
    return Places(
        entries=entries,
        plain=plain,
        dtypes=dtypes,
        update=update if update.norms is None else update.at(group.positions),
        written=[t for i, row in enumerate(group.rows) if i != 1 for t in row],
        kept=kept | turn,
    )


def _kept_table(
    group: Group, rows: Sequence[Tensors], names: Sequence[str], stored: Stored
) -> Table:
    """Behind ``rows``: scales of both lists, numbers, starts, and lengths of rows."""
    count = len(group.positions)
    columns = group.rows[len(names) :]
    behind = [[t.data_ptr() for t in row] or [0] * count for row in columns]
    behind += [[0] * count for _ in range(2 - len(behind))]
    behind += [pick(stored.numbers, group.positions), pick(stored.starts, group.positions)]
    shapes = [tensor.shape for tensor in rows[0]]
    behind.append([math.prod(shape[1:]) for shape in shapes])
    sizes = None
    if any([kind.has_scales for kind in stored.formats]):
        sizes = [math.prod(scales_shape(shape)) * SLOTS for shape in shapes]
    return table(rows, range(count), behind, sizes)


def _turn(step: int | torch.Tensor, entries: Table) -> dict[str, Any]:
    """The number of the update, as an integer."""
    if isinstance(step, torch.Tensor):
        return {"turn_at": moved(step, entries.layout.device), "TURN_AT": True}
    return {"turn": step, "turn_at": entries.layout, "TURN_AT": False}
