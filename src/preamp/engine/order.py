# SPDX-License-Identifier: BSD-3-Clause
"""Which gradient was made first, by the graphs of the very backwards that made them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.autograd.graph import Node

from preamp.core.torch_private.autograd import TELLS_HOOKS, BackwardOrder, backward_order, is_freed

T = TypeVar("T")

Graph = Node | BackwardOrder | None
"""The root of a backward's graph, or the order that it was followed to; ``None`` if not known."""

_KEPT = 64  # graphs: of longer accumulations nobody knows


def followed(graphs: Sequence[Graph]) -> list[Graph]:
    """Find the orders now, when something has overflowed and the graphs are still there."""
    return [backward_order(graph) if isinstance(graph, Node) else graph for graph in graphs]


def released(graphs: Sequence[Graph]) -> list[Graph]:
    """Keep for later what keeps no activations alive: graphs that a backward has freed.

    Where torch does not tell which those are, the graphs are followed, which takes longer.
    """
    kept = list(graphs[:_KEPT]) if TELLS_HOOKS else followed(graphs[:_KEPT])
    kept = [None if isinstance(g, Node) and not is_freed(g) else g for g in kept]
    return [*kept, None] if len(graphs) > _KEPT else kept


def sort_by_time(
    graphs: Sequence[Graph], items: Sequence[T], param_of: Callable[[T], torch.Tensor]
) -> tuple[list[T], int]:
    """Sort ``items`` by when one of the backwards has made the gradients of their parameters.

    Returns them, and how many of them, from the first on, may have been the first.
    """
    orders = [graph for graph in followed(graphs) if isinstance(graph, BackwardOrder)]
    if not orders or len(orders) < len(graphs):
        return list(items), len(items)
    # Of several backwards any that has made one of them may have made the first.
    ids = [id(param_of(item)) for item in items]
    made = {key for order in orders for key in order.places}
    own = [one for one in orders if one.opaque or not one.places.keys().isdisjoint(ids)]
    qualify = {place for order in own or orders for place in _earliest(order, ids, made)}
    when = _times((own or orders)[0], ids)
    by_time = sorted(range(len(items)), key=lambda place: (place not in qualify, when[place]))
    return [items[place] for place in by_time], len(qualify)


def _times(order: BackwardOrder, ids: Sequence[int]) -> list[float]:
    """When each gradient was made at the earliest, if by a backward inside of another's node."""
    inside = order.opaque[0] if order.opaque else math.inf
    return [order.places.get(key, inside) for key in ids]


def _earliest(order: BackwardOrder, ids: Sequence[int], made: set[int]) -> list[int]:
    """Which gradients may have been made first; any of the backwards has ``made`` some of them."""
    times = _times(order, ids)
    known = [time for key, time in zip(ids, times, strict=True) if key in order.places]
    first = min(known, default=math.inf)
    strange = order.places if order.opaque else made
    early = [place for place, key in enumerate(ids) if key not in strange]
    if order.opaque and order.opaque[0] > first:
        early.clear()
    # What was made inside of the only node that can have made it was made before all later ones.
    if len(order.opaque) == 1 and early:
        return early
    return early + [
        place for place, time in enumerate(times) if time == first and place not in early
    ]
