# SPDX-License-Identifier: BSD-3-Clause
"""Largest magnitudes and norms, per tensor, in two launches: per chunk, then per tensor."""

from __future__ import annotations

import torch

from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.device.reductions import gather_kernel, measure_chunks
from preamp.kernels.triton.launch import given, launch, width_of
from preamp.kernels.triton.tables import CHUNK, Table


def gather(
    entries: Table,
    partials: torch.Tensor,
    results: torch.Tensor,
    *,
    largest: bool,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Write the norm, or the ``largest`` magnitude, of each tensor to its place in ``results``.

    ``found_inf`` becomes 1 if one of them is not finite, and is left alone otherwise.
    """
    launch(
        gather_kernel,
        (entries.count,),
        entries,
        partials=partials,
        results=results,
        found_inf=results if found_inf is None else found_inf,
        MAX=largest,
        FOUND_INF=found_inf is not None,
    )


def measure(
    entries: Table,
    column: tuple[int, torch.dtype | None],
    *,
    beside: tuple[int, torch.dtype | None] = (0, None),
    largest: bool,
    squares: bool,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return per chunk of one list what is asked for, a row of each in this order.

    ``column`` are the list's row and dtype; ``factor`` multiplies every value before anything else.
    ``beside`` are row and dtype of what else says the values: half weights, or the low bits of
    split ones.
    """
    shape = (largest + squares, entries.chunks)
    partials = torch.empty(shape, dtype=torch.float32, device=entries.layout.device)
    launch(
        measure_chunks,
        (entries.chunks,),
        entries,
        partials=partials,
        **given("factor", factor, entries),
        X=KINDS[column[1]],
        ROW=column[0],
        H=KINDS[beside[1]],
        H_ROW=beside[0],
        MAX=largest,
        SUM=squares,
        CHUNK=CHUNK,
        WIDTH=width_of(),
    )
    return partials
