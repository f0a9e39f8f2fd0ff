# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that lie on devices, read all together: each read by itself makes the host wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.core.pytree import map_plain


@dataclass(frozen=True, slots=True, eq=False)
class LateNumber:
    """A number in a tree of plain data, not read from its device yet."""

    kind: Callable[[Any], Any]  # ``float``, ``int`` or ``bool``, whichever it becomes
    value: torch.Tensor  # a scalar of at most 53 binary digits


def read_numbers(tree: Any) -> Any:
    """Return a tree of plain data in which each `LateNumber` is read; waits once for each device.

    Not mutated.
    """
    late: list[LateNumber] = []
    map_plain(lambda leaf: late.append(leaf) if isinstance(leaf, LateNumber) else None, tree)
    read: dict[int, Any] = {}
    for device in {number.value.device for number in late}:
        here = [number for number in late if number.value.device == device]
        if device.type == "cuda":
            wide = [number.value.detach().double().reshape(()) for number in here]
            values: list[float] = cast("Any", torch.stack(wide)).tolist()
        else:
            values = [number.value.item() for number in here]
        read |= {id(number): number.kind(value) for number, value in zip(here, values, strict=True)}
    return map_plain(lambda leaf: read.get(id(leaf), leaf), tree)
