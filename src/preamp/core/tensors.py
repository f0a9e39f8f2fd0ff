# SPDX-License-Identifier: BSD-3-Clause
"""Two things torch knows of a tensor and has no public function for."""

from __future__ import annotations

from typing import Any, cast

import torch

# The descriptor itself, reached through Any because torch's type stubs show only its value.
_GRAD_SLOT = cast("Any", torch.Tensor).grad


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was changed in place; views of it count, writes by ``.data`` do not."""
    return tensor._version  # noqa: SLF001


def stored_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient that lies in ``param`` itself, whatever a subclass shows as ``grad``."""
    return _GRAD_SLOT.__get__(param)


def store_grad(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set the gradient in ``param`` itself, past a subclass's ``grad`` property."""
    _GRAD_SLOT.__set__(param, grad)
