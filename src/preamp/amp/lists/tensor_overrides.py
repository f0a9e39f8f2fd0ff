# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.lists.tensor_overrides``."""

from preamp.compat.lists.tensor_overrides import BANNED_FUNCS as BANNED_FUNCS
from preamp.compat.lists.tensor_overrides import BFLOAT16_FUNCS as BFLOAT16_FUNCS
from preamp.compat.lists.tensor_overrides import CASTS as CASTS
from preamp.compat.lists.tensor_overrides import FP16_FUNCS as FP16_FUNCS
from preamp.compat.lists.tensor_overrides import FP32_FUNCS as FP32_FUNCS
from preamp.compat.lists.tensor_overrides import MODULE as MODULE
from preamp.compat.lists.tensor_overrides import SEQUENCE_CASTS as SEQUENCE_CASTS

__all__ = [
    "BANNED_FUNCS",
    "BFLOAT16_FUNCS",
    "CASTS",
    "FP16_FUNCS",
    "FP32_FUNCS",
    "MODULE",
    "SEQUENCE_CASTS",
]
