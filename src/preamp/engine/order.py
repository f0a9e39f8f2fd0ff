# SPDX-License-Identifier: BSD-3-Clause
"""Which parameter's gradient a backward makes first, learned by watching one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.utils.hooks import RemovableHandle

T = TypeVar("T")


class Watch:
    """The hooks on the parameters during one backward."""

    def __init__(self, handles: Sequence[RemovableHandle], learned: Callable[[], None]) -> None:
        """Keep ``handles`` until `end`."""
        self._handles = handles
        self._learned = learned

    def end(self, *, has_failed: bool = False) -> None:
        """Take the hooks off and keep what they saw unless the backward ``has_failed``; once."""
        handles, self._handles = self._handles, ()
        for handle in handles:
            handle.remove()
        if handles and not has_failed:
            self._learned()


_NOTHING = Watch((), lambda: None)


class BackwardOrder:
    """The order in which each loss's first backward made gradients; learned again for new ones."""

    def __init__(self) -> None:
        """Start without knowledge."""
        self._places: dict[int, dict[int, int]] = {}
        self.known: set[int] = set()  # losses whose order is known

    def watch(self, loss_id: int, params: Callable[[], Iterable[torch.Tensor]]) -> Watch:
        """Learn from the coming backward, if needed; what is returned must be ended after it."""
        if loss_id in self.known:
            return _NOTHING
        seen: dict[int, int] = {}

        def note(param: torch.Tensor) -> None:
            seen.setdefault(id(param), len(seen))

        def learned() -> None:
            earlier = self._places.get(loss_id, {})
            late = [key for key in earlier if key not in seen]
            self._places[loss_id] = {key: place for place, key in enumerate((*seen, *late))}
            # Also if nothing was seen, as where a script sets gradients itself: hooks on every
            # parameter cost more than the rest of a block's books.
            self.known.add(loss_id)

        handles: list[RemovableHandle] = [
            cast("Any", param).register_post_accumulate_grad_hook(note)
            for param in params()
            if param.requires_grad and param.is_leaf
        ]
        return Watch(handles, learned)

    def learn_again(self) -> None:
        """There are new parameters: watch the next backward of each loss."""
        self.known.clear()

    def sort(
        self, loss_id: int, items: Iterable[T], param_of: Callable[[T], torch.Tensor]
    ) -> list[T]:
        """Sort ``items`` by when the backward of a loss makes their parameters' gradients.

        Those of unknown place come last, in the order given, and the next backward is watched.
        """
        places = self._places.get(loss_id, {})
        known: list[tuple[int, T]] = []
        unknown: list[T] = []
        for item in items:
            place = places.get(id(param_of(item)))
            if place is None:
                unknown.append(item)
            else:
                known.append((place, item))
        if unknown:
            self.known.discard(loss_id)
        return [item for _, item in sorted(known, key=lambda pair: pair[0])] + unknown
