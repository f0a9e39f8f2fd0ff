# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.amp``: the casts of functions, and ``init``."""

from preamp.casting import bfloat16_function as bfloat16_function
from preamp.casting import float_function as float_function
from preamp.casting import half_function as half_function
from preamp.casting import promote_function as promote_function
from preamp.casting import register_bfloat16_function as register_bfloat16_function
from preamp.casting import register_float_function as register_float_function
from preamp.casting import register_half_function as register_half_function
from preamp.casting import register_promote_function as register_promote_function
from preamp.compat.handle import init as init

__all__ = [
    "bfloat16_function",
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]
