# SPDX-License-Identifier: BSD-3-Clause
"""Autograd's graph, and the backward under way; torch has both, but not in public."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from preamp.core.dtypes import HALF_DTYPES

CHECKPOINT_STATE: Final = (torch.utils.checkpoint, "_get_autocast_kwargs")
"""The function, as module and name, by which activation checkpoints read the autocast state."""

TELLS_HOOKS: Final = hasattr(cast("Any", torch)._C._autograd.SavedTensor, "unpack_hook")
"""Whether torch says what hooks unpack a saved tensor without calling them; 2.6 does not."""


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


_PASSED = ("Add", "Sub", "Mul", "Div", "Sum", "Mean", "Stack", "ToCopy", "Clone", "Squeeze", "View")
_FEW = 64
_MANY = 512


def nodes_made() -> int:
    """How many nodes this thread has made so far; see `is_made_since`."""
    return cast("Any", torch.autograd)._get_sequence_nr()


def is_made_since(root: torch.Tensor, count: int) -> bool:
    """Whether all of the graph above ``root`` was made when `nodes_made` was ``count`` or more."""
    nodes: Any = () if root.grad_fn is None else _nodes_above(root.grad_fn)
    return min((node._sequence_nr() for node in nodes), default=-1) >= count


def terms_of(root: torch.Tensor, stop: Container[Node]) -> list[Node]:
    """What ``root`` is added up from: nodes of ``stop``, or those that are no plain arithmetic.

    At most 64 nodes are looked at. Nothing is changed, and nothing synchronises.
    """
    found: list[Node] = []
    pending = [] if root.grad_fn is None else [root.grad_fn]
    for node in pending:  # which grows
        if node in stop or not node.name().startswith(_PASSED):
            found.append(node)
        elif len(pending) < _FEW:
            pending += [after for after, _ in node.next_functions if after is not None]
    return found


def half_loss_dtype(root: torch.Tensor) -> torch.dtype | None:
    """The half dtype in which a loss function of torch has computed a term of ``root``.

    As far as `terms_of` tells, which passes by casts. Functions of Python's are left out: what they
    compute in does not show.
    """
    for node in terms_of(root, ()):
        is_loss = "Loss" in node.name() or "CrossEntropy" in node.name()
        if is_loss and not isinstance(node, BackwardCFunction):
            for made in cast("Any", node)._input_metadata:
                if made.dtype in HALF_DTYPES:
                    return made.dtype
    return None


def casts_of_leaves(root: Node) -> Iterator[tuple[Node, torch.Tensor]]:
    """The casts of leaves in the graph above ``root``, each with its leaf."""
    for node in _nodes_above(root):
        for after in _following(node) if node.name().startswith("ToCopy") else ():
            leaf = _leaf_of(after)
            if leaf is not None:
                yield node, leaf


def reached_from(root: torch.Tensor, targets: Container[Node]) -> set[Node]:
    """Those of ``targets`` that ``root`` was computed from, as far as a few hundred nodes tell."""
    found: set[Node] = set()
    pending = [] if root.grad_fn is None else [root.grad_fn]
    seen = set(pending)
    for node in pending:  # which grows
        if node in targets:
            found.add(node)
        elif len(pending) < _MANY:
            after = {n for n, _ in node.next_functions if n is not None} - seen
            seen |= after
            pending += after
    return found


def constant_factors(loss: torch.Tensor, *, waits: bool) -> list[float] | None:
    """The numbers that ``loss`` was multiplied or divided by, the last first, as factors.

    What came before its last sum, or a product with a tensor that has a gradient, is not looked at.
    ``None`` if a number is on another device and not ``waits``; with it that synchronises.
    """
    factors: list[float] = []
    node = loss.grad_fn
    while node is not None and node.name().startswith(("Mul", "Div", "Neg", "ToCopy")):
        # Of a quotient what divides: a number above the loss makes no multiple of it.
        names = ("_saved_other", "_saved_self")[: 1 if node.name().startswith("Div") else 2]
        kept = [getattr(node, name, None) for name in names]
        numbers = [k for k in kept if isinstance(k, torch.Tensor) and k.numel() == 1]
        number = next((k for k in numbers if not k.requires_grad), None)
        if node.name().startswith(("Mul", "Div")):
            if number is None:
                break
            if number.device.type != "cpu" and not waits:
                return None
            # Below a dispatch mode a number by itself is no tensor to read from.
            zero = torch.zeros((), dtype=torch.float64, device=number.device)
            value = float(zero + number)
            factors.append(value if node.name().startswith("Mul") else 1 / (value or math.nan))
        node = next((after for after, _ in node.next_functions if after is not None), None)
    return factors


def shared_factors(
    roots: Iterable[torch.Tensor], seeds: Iterable[torch.Tensor], *, waits: bool
) -> list[float] | None:
    """What all ``roots`` of a backward with ``seeds`` were multiplied by; see `constant_factors`.

    ``None`` if it is not known, differs, or a seed has several values: it may be of another graph.
    """
    own = [constant_factors(root, waits=waits) for root in roots]
    given = [_single_value(seed, waits=waits) for seed in seeds]
    known = [factors for factors in (*own[:1], *given[:1]) if factors is not None]
    is_shared = all(one == own[0] for one in own) and all(one == given[0] for one in given)
    is_known = len(known) == len(own[:1]) + len(given[:1])
    return [factor for factors in known for factor in factors] if is_shared and is_known else None


def _single_value(seed: torch.Tensor, *, waits: bool) -> list[float] | None:
    if not seed.numel() or (seed.device.type != "cpu" and not waits):
        return None
    value = seed.detach().flatten()[0]
    return [float(value)] if bool((seed == value).all()) else None


def is_mean(loss: torch.Tensor) -> bool:
    """Whether ``loss`` is a mean, or one and something added, which nobody has divided since."""
    pending = [] if loss.grad_fn is None else [loss.grad_fn]
    for node in pending:  # which grows
        if node.name().startswith("Mean") or getattr(node, "_saved_reduction", 0) == 1:
            return True
        if node.name().startswith(("Add", "ToCopy", "Clone")) and len(pending) < _FEW:
            pending += [after for after, _ in node.next_functions if after is not None]
    return False


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether the script has hooks on the gradient of ``leaf``."""
    hooks = (getattr(leaf, f"_{kind}_hooks", None) for kind in ("backward", "post_accumulate_grad"))
    return any(map(bool, hooks))


def leaves_above(root: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that a backward from ``root`` gives gradients to."""
    nodes = () if root.grad_fn is None else _nodes_above(root.grad_fn)
    return [leaf for node in nodes if (leaf := getattr(node, "variable", None)) is not None]


def is_freed(root: Node) -> bool:
    """Whether a backward has freed what the graph above ``root`` kept for it.

    Such a graph costs next to nothing to hold, but for attributes of Python's functions. Also true
    of one that had kept nothing; false where only such functions could tell. What hooks keep, such
    as those of activation checkpoints, is not asked for: false where torch does not tell of hooks.
    """
    if not TELLS_HOOKS:
        return False
    for node in _nodes_above(root):
        if isinstance(node, BackwardCFunction):
            return False
        try:
            if any(_keeps(node, name) for name in dir(node) if name.startswith("_saved_")):
                return False
        except RuntimeError:
            return True
    return True


def _keeps(node: Node, name: str) -> bool:
    """Whether ``node`` has tensors there, or what hooks make them of.

    Raises:
        RuntimeError: They were freed.
    """
    raw: Any = getattr(node, f"_raw{name}", None)
    if raw is None:  # a number, or a size
        return False
    if any(getattr(one, "unpack_hook", None) is not None for one in _listed(raw)):
        return True
    return any(isinstance(one, torch.Tensor) for one in _listed(getattr(node, name)))


def _listed(kept: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", kept) if isinstance(kept, tuple) else (kept,)


def _nodes_above(root: Node) -> Iterator[Node]:
    """All nodes of a graph, the nearest first."""
    pending, seen = deque([root]), {root}
    while pending:
        node = pending.popleft()
        yield node
        following = [after for after in _following(node) if after not in seen]
        pending += following
        seen.update(following)


@dataclass(frozen=True, slots=True)
class BackwardOrder:
    """In which order a backward has made the gradients of leaves."""

    # When, by ``id`` of the leaf. Equal for those that one function of Python's has made at a time,
    # as that of a compiled graph does.
    places: dict[int, int]
    # When functions of Python's ran: they may have run a backward of their own inside, and so made
    # gradients of other leaves
    opaque: list[int]


def backward_order(root: Node) -> BackwardOrder:
    """Follow a backward from ``root``, which may be over, as torch's engine schedules it.

    Of the nodes whose gradients have all come the one that was made last runs first. What runs on
    several devices at a time is told in the order in which it would run on one.
    """
    waits_for: Counter[Node] = Counter()
    seen, pending = {root}, [root]
    while pending:
        for after in _following(pending.pop()):
            waits_for[after] += 1
            if after not in seen:
                seen.add(after)
                pending.append(after)
    ready, places, opaque = _ReadyQueue(), dict[int, int](), list[int]()
    ready.push(root, 0)
    now = 0
    while ready.heap:
        node, together = ready.pop()
        now += 1
        leaf = _leaf_of(node)
        if leaf is not None:
            places[id(leaf)] = together or now
        is_of_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        if is_of_python:
            opaque.append(now)
        for after in _following(node):
            waits_for[after] -= 1
            if not waits_for[after]:
                ready.push(after, now if is_of_python else 0)
    return BackwardOrder(places, opaque)


def _following(node: Node) -> list[Node]:
    return [after for after, _ in node.next_functions if after is not None]


def _leaf_of(node: Node) -> torch.Tensor | None:
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, torch.Tensor) else None


class _ReadyQueue:
    """The heap of torch's engine: ``std::priority_queue`` as libstdc++ has it.

    Step by step, since nodes that collect gradients are all of one priority, and which of them is
    first depends on where the heap has put them.
    """

    def __init__(self) -> None:
        self.heap: list[tuple[int, Node, int]] = []

    def push(self, node: Node, mark: int) -> None:
        """Add a node, with a mark that `pop` returns."""
        self.heap.append((0, node, mark))
        number = cast("Any", node)._sequence_nr()  # of when it was made, on its thread
        self._rise(len(self.heap) - 1, (number, node, mark))

    def _rise(self, hole: int, entry: tuple[int, Node, int]) -> None:
        while hole and self.heap[(hole - 1) // 2][0] < entry[0]:
            self.heap[hole] = self.heap[(hole - 1) // 2]
            hole = (hole - 1) // 2
        self.heap[hole] = entry

    def pop(self) -> tuple[Node, int]:
        """Take out the node that runs next."""
        heap = self.heap
        (_, node, mark), last = heap[0], heap.pop()
        hole, size = 0, len(heap)
        while (right := 2 * hole + 2) < size:
            child = right - 1 if heap[right][0] < heap[right - 1][0] else right
            heap[hole] = heap[child]
            hole = child
        if right == size:
            heap[hole] = heap[right - 1]
            hole = right - 1
        if heap:
            self._rise(hole, last)
        return node, mark
