# SPDX-License-Identifier: BSD-3-Clause
"""What a script writes to half weights, brought to the float32 copies that updates start from."""

from __future__ import annotations

import torch

from preamp.core.errors import PreampStateError, message


def take_over(half: torch.Tensor, wide: torch.Tensor) -> None:
    """Take the values of ``half`` into ``wide`` where they are not those of ``wide``, rounded.

    Elements that still equal their rounded copy keep its precision.

    Args:
        half: Half values, without a gradient's graph.
        wide: float32, on the same device; written to.
    """
    same = wide.to(half.dtype) == half
    wide.copy_(torch.where(same, wide, half.float()))


def became_wide(name: str) -> PreampStateError:
    """Return the error for a half parameter that the script made float32."""
    return PreampStateError(
        message(
            f"The half parameter {name!r} became float32 after initialize",
            "A model with master weights keeps the dtypes that initialize gave it",
            "Call preamp.engine_of(model).close() before model.float()",
        )
    )
