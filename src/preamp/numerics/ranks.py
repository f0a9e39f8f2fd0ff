# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of all ranks as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from preamp.core.ranks import gather_objects
from preamp.numerics.records import NumericsRecord, TensorStatistics
from preamp.numerics.statistics import add_up


def add_up_ranks(records: Iterable[NumericsRecord], *, group: Any = None) -> list[NumericsRecord]:
    """Unite the statistics that the ranks of a process group have taken; all of them call this.

    Tensors of the same step, loss, optimizer, name and kind become one: their elements are added
    up. That is the whole of what was watched of modules, of which each rank sees its own share of
    the batch, and of sharded parameters. Gradients and weights that ranks have alike, as under
    ``DistributedDataParallel``, count once for each rank; their shares and magnitudes stay.

    Args:
        records: Of this rank, such as ``engine.history.of(NumericsRecord)``; ranks may have
            records of different steps.
        group: The process group; by default all ranks. Without ``torch.distributed`` the records
            come back as they are, but for parts of the same tensor.

    Returns:
        The records of all ranks on every rank, by step.
    """
    of_ranks: list[list[NumericsRecord]] = gather_objects(list(records), group)
    found: dict[tuple[int, int, int], list[TensorStatistics]] = {}
    first: dict[tuple[int, int, int], NumericsRecord] = {}
    for record in (record for records in of_ranks for record in records):
        key = record.step, record.optimizer, record.loss_id
        first.setdefault(key, record)
        found.setdefault(key, []).extend(record.tensors)
    return [replace(first[key], tensors=add_up(found[key])) for key in sorted(found)]
