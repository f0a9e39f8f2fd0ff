# SPDX-License-Identifier: BSD-3-Clause
"""Which backward is under way, and what is to follow it; torch has both, but not in public."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch


def backward_under_way() -> int:
    """A number of the backward that this thread works on; -1 if there is none.

    A backward inside another one, as in reentrant checkpoints, has a number of its own.
    """
    return cast("Any", torch)._C._current_graph_task_id()


def after_backward(call: Callable[[], None]) -> None:
    """Call ``call`` when the backward under way has accumulated all its gradients.

    Only hooks of a backward may ask for it. What ``call`` raises, ``backward`` raises; after a
    backward that fails it is not called.
    """
    cast("Any", torch.autograd).Variable._execution_engine.queue_callback(call)
