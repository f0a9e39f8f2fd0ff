# SPDX-License-Identifier: BSD-3-Clause
"""What the kernels of linear combinations, and of splitting and joining, are started with."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import chain

import torch

from preamp.kernels.ops import Column
from preamp.kernels.places import Combining, Group, sort
from preamp.kernels.triton.device.elementwise import (
    combine_kernel,
    convert_kernel,
    take_over_kernel,
)
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.launch import PLAIN, check_devices, launch, moved, scalar, width_of
from preamp.kernels.triton.tables import CHUNK, sizes_of, table
from preamp.kernels.update import Scalar


class Elementwise(Combining):
    """Scaling, adding, casting, splitting and joining."""

    plain = PLAIN

    def _groups(
        self, *columns: Column, codes: Set[torch.dtype] = frozenset()
    ) -> tuple[list[Group], list[int]]:
        check_devices(columns[0])
        return sort(*columns, codes=codes)

    def _combine(
        self, group: Group, a: Scalar, b: Scalar = 1.0, factors: Sequence[torch.Tensor] = ()
    ) -> None:
        rows = [row for row in group.rows if row]
        if factors:
            rows.append([moved(factors[i].float(), group.device) for i in group.positions])
        target, x, y = group.dtypes
        entries = table(rows, group.positions, sizes=sizes_of(group))
        launch(
            combine_kernel,
            (entries.chunks,),
            entries,
            **scalar("a", a, entries),
            **scalar("b", b, entries),
            T=KINDS[target],
            X=KINDS[x],
            Y=KINDS[y],
            A_EACH=len(rows) - 1 if factors else 0,
            CHUNK=CHUNK,
            WIDTH=width_of(target),
        )
        torch.autograd.graph.increment_version(group.rows[0])

    def _take_over(self, group: Group) -> None:
        entries = table(group.rows[:2], group.positions, sizes=sizes_of(group))
        launch(
            take_over_kernel,
            (entries.chunks,),
            entries,
            P=KINDS[group.dtypes[0]],
            H=KINDS[group.dtypes[1]],
            CHUNK=CHUNK,
            WIDTH=width_of(group.dtypes[0]),
        )
        torch.autograd.graph.increment_version(group.rows[0])

    def _convert(self, group: Group, *, joins: bool) -> None:
        rows = [row for row in group.rows if row]
        entries = table(rows, group.positions, sizes=sizes_of(group))
        launch(
            convert_kernel,
            (entries.chunks,),
            entries,
            P=KINDS[group.dtypes[1]],
            H=KINDS[group.dtypes[2]],
            JOINS=joins,
            CHUNK=CHUNK,
            WIDTH=width_of(group.dtypes[0] if joins else group.dtypes[1]),
        )
        written = group.rows[:1] if joins else group.rows[1:]
        torch.autograd.graph.increment_version([*chain.from_iterable(written)])
