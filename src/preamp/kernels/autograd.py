# SPDX-License-Identifier: BSD-3-Clause
"""Autograd's graph, and the backward under way; torch has both, but not in public."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.autograd.graph import Node


def backward_under_way() -> int:
    """The number of this thread's backward, an inner one's where they nest; -1 if there is none."""
    return cast("Any", torch)._C._current_graph_task_id()


def after_backward(call: Callable[[], None]) -> None:
    """Let a backward's hook have ``call`` run when all gradients are there, unless it fails."""
    cast("Any", torch.autograd).Variable._execution_engine.queue_callback(call)


def leaves_through(roots: Iterable[torch.Tensor], dtype: torch.dtype) -> set[int]:
    """The ``id`` of each leaf that a backward from ``roots`` reaches through ``dtype``.

    A gradient that has been of ``dtype`` anywhere on its way counts, the leaf's own dtype
    included. What a node computes inside, as that of a compiled region does, is not seen.
    Nothing is changed, and nothing synchronises.
    """
    found: set[int] = set()
    passed: dict[Node, bool] = {}
    pending = [(root.grad_fn, False) for root in roots if root.grad_fn is not None]
    while pending:
        node, is_through = pending.pop()
        metadata: Iterable[Any] = getattr(node, "_input_metadata", ())
        is_through = is_through or any(getattr(m, "dtype", None) is dtype for m in metadata)
        # A node is looked at again where a second way to it is the first through the dtype.
        if node in passed and passed[node] >= is_through:
            continue
        passed[node] = is_through
        if is_through and isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            found.add(id(leaf))
        pending += [(after, is_through) for after, _ in node.next_functions if after is not None]
    return found
