# SPDX-License-Identifier: BSD-3-Clause
"""A probe on torch.compile: what it compiles runs as if nobody looked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from preamp.core.undo import UndoStack
from preamp.doctor.probes.casts import CastProbes
from preamp.doctor.probes.modules import ModuleProbes
from preamp.doctor.probes.watch import Watch, around


class CompileProbe:
    """Ends what would be compiled into the model, or would keep it from running compiled."""

    def __init__(
        self, watch: Watch, undo: UndoStack, modules: ModuleProbes, casts: CastProbes
    ) -> None:
        """Install the probe; ``undo`` takes it off."""
        self._watch = watch
        self._probes = (modules, casts)
        around(torch, "compile", self._compile, undo)

    def _compile(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._watch.is_active:
            if not self._watch.seen.compiles:
                self._watch.seen.compiles = True
                for probe in self._probes:
                    probe.leave_alone()
                self._watch.seen.notes.append(
                    "The script uses torch.compile. From there on calls of modules, autocast and "
                    "casts were not looked at, which PA102, PA203, PA301, PA302, PA501 and PA502 "
                    "wholly or partly rely on. A compiled optimizer.step is not seen at all."
                )
            model = args[0] if args else kwargs.get("model")
            model = getattr(model, "__self__", model)  # Module.compile hands over a method
            if isinstance(model, nn.Module):
                self._watch.seen.roots[model] = None
        return function(*args, **kwargs)
