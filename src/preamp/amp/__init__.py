# SPDX-License-Identifier: BSD-3-Clause
"""The names of ``apex.amp``: migrating is ``from preamp import amp``."""

from preamp.amp import _initialize as _initialize
from preamp.amp import amp as amp
from preamp.amp import frontend as frontend
from preamp.amp import handle as handle
from preamp.amp import scaler as scaler
from preamp.amp._amp_state import _amp_state as _amp_state
from preamp.casting import bfloat16_function as bfloat16_function
from preamp.casting import disable_casts as disable_casts
from preamp.casting import float_function as float_function
from preamp.casting import half_function as half_function
from preamp.casting import promote_function as promote_function
from preamp.casting import register_bfloat16_function as register_bfloat16_function
from preamp.casting import register_float_function as register_float_function
from preamp.casting import register_half_function as register_half_function
from preamp.casting import register_promote_function as register_promote_function
from preamp.compat.frontend import initialize as initialize
from preamp.compat.frontend import load_state_dict as load_state_dict
from preamp.compat.frontend import master_params as master_params
from preamp.compat.frontend import scale_loss as scale_loss
from preamp.compat.frontend import state_dict as state_dict
from preamp.compat.handle import init as init
from preamp.compat.scaler import LossScaler as LossScaler

__all__ = [
    "LossScaler",
    "_amp_state",
    "bfloat16_function",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
