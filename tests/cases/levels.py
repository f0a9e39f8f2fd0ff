# SPDX-License-Identifier: BSD-3-Clause
"""One row per opt level: what the generic tests may expect of it."""

from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCase:
    """Facts about one opt level, written down independently of the library's own table.

    Attributes:
        name: ``"O0"`` to ``"O5"``.
        half: The half dtype it computes in, or ``None``.
        weight: dtype of ordinary model weights after ``initialize``.
        norm: dtype of batch-norm weights after ``initialize``.
        has_masters: Whether half weights have float32 masters.
        casts_functions: Whether functions are cast one by one.
        is_dynamic: Whether the default loss scale is dynamic.
    """

    name: str
    half: torch.dtype | None = None
    weight: torch.dtype = torch.float32
    norm: torch.dtype = torch.float32
    has_masters: bool = False
    casts_functions: bool = False
    is_dynamic: bool = False


LEVELS = (
    LevelCase(name="O0"),
    LevelCase(name="O1", half=torch.float16, casts_functions=True, is_dynamic=True),
    LevelCase(
        name="O2", half=torch.float16, weight=torch.float16, has_masters=True, is_dynamic=True
    ),
    LevelCase(name="O3", half=torch.float16, weight=torch.float16, norm=torch.float16),
    LevelCase(name="O4", half=torch.bfloat16, casts_functions=True),
    LevelCase(name="O5", half=torch.bfloat16, weight=torch.bfloat16, has_masters=True),
)

LEVEL_NAMES = tuple(row.name for row in LEVELS)
BY_KIND = tuple(
    pytest.param(row.name, marks=[pytest.mark.full] if row.half is torch.bfloat16 else [])
    for row in LEVELS
)
"""For costly tests: bfloat16's levels in the full suite only, whose kinds float16 has too."""
BY_NAME = {row.name: row for row in LEVELS}
WITH_MASTERS = tuple(row.name for row in LEVELS if row.has_masters)
CASTING_FUNCTIONS = tuple(row.name for row in LEVELS if row.casts_functions)
HALF_WEIGHTS = tuple(row.name for row in LEVELS if row.weight is not torch.float32)
F32_WEIGHTS = tuple(row.name for row in LEVELS if row.weight is torch.float32)
EXACT = tuple(row.name for row in LEVELS if row.weight is torch.float32 or row.has_masters)
"""Levels whose optimizer works on float32 values: exact gradients give exact updates."""
