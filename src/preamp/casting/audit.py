# SPDX-License-Identifier: BSD-3-Clause
"""Count what is cast, by function and by line of the program."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass

import torch

from preamp.casting.reports import Cast, listen
from preamp.core.program import line_of_program, shown
from preamp.core.undo import UndoStack


@dataclass(frozen=True, slots=True)
class CastSite:
    """Casts that are counted together."""

    function: str  # whose argument is cast, such as ``"linear"``
    source: torch.dtype  # dtype before
    target: torch.dtype  # dtype after
    where: str  # ``"file.py:12"``, the innermost line that is neither torch's nor preamp's
    note: str = ""  # of a constant that half cannot hold: what became of it


class CastAudit:
    """Counts the casts of functions while it is on; casts of the whole process, as these are.

    It costs a walk up the stack for each cast. A weight counts in each call, also where autocast's
    cache held its cast, and casts inside compiled code are not seen.
    """

    def __init__(self) -> None:
        self.calls: Counter[CastSite] = Counter()  # tensors cast, by site
        self.elements: Counter[CastSite] = Counter()  # their elements, by site
        self._listening = UndoStack()
        self._is_on = self._is_listening = False

    def start(self) -> None:
        """Count from now on."""
        self._is_on = True
        self.resume()

    def pause(self) -> None:
        """Do not count until `resume`."""
        self._listening.unwind()
        self._is_listening = False

    def resume(self) -> None:
        """Go on counting after `pause`; nothing after `stop`."""
        if self._is_on and not self._is_listening:
            listen(self._count, self._listening)
            self._is_listening = True

    def stop(self) -> None:
        """Count no longer; what was counted stays."""
        self._is_on = False
        self.pause()

    def _count(self, made: Cast) -> None:
        where = shown(line_of_program(inspect.currentframe()))
        site = CastSite(made.function, made.source, made.target, where, made.note)
        self.calls[site] += 1
        self.elements[site] += made.elements
