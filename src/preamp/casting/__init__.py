# SPDX-License-Identifier: BSD-3-Clause
"""Casts: of functions (O1, O4), of whole models (O2, O3, O5), of what goes in and out."""

from preamp.casting.functions import install_function_casts as install_function_casts
from preamp.casting.functions import install_wide_where_slow as install_wide_where_slow
from preamp.casting.functions import namespace_owner as namespace_owner
from preamp.casting.io import attach_io_casts as attach_io_casts
from preamp.casting.kept import changed_by_cast as changed_by_cast
from preamp.casting.kept import find_kept as find_kept
from preamp.casting.mixed import install_mixed_calls as install_mixed_calls
from preamp.casting.modules import Conversion as Conversion
from preamp.casting.modules import attach_layer_casts as attach_layer_casts
from preamp.casting.op_lists import OP_TABLE as OP_TABLE
from preamp.casting.op_lists import Namespace as Namespace
from preamp.casting.op_lists import Rule as Rule
from preamp.casting.patches import PATCH_LOCK as PATCH_LOCK
from preamp.casting.regions import attach_cast_region as attach_cast_region
from preamp.casting.regions import attach_plain_region as attach_plain_region
from preamp.casting.registry import bfloat16_function as bfloat16_function
from preamp.casting.registry import float_function as float_function
from preamp.casting.registry import half_function as half_function
from preamp.casting.registry import promote_function as promote_function
from preamp.casting.registry import register_bfloat16_function as register_bfloat16_function
from preamp.casting.registry import register_float_function as register_float_function
from preamp.casting.registry import register_half_function as register_half_function
from preamp.casting.registry import register_promote_function as register_promote_function
from preamp.casting.reports import Cast as Cast
from preamp.casting.reports import listen as listen
from preamp.casting.state_hooks import attach_state_hooks as attach_state_hooks
from preamp.casting.thread_casts import CASTS as CASTS
from preamp.casting.thread_casts import disable_casts as disable_casts
from preamp.casting.thread_casts import is_any_casting as is_any_casting
from preamp.casting.thread_casts import push_thread_casts as push_thread_casts
from preamp.casting.thread_casts import thread_casts_restored as thread_casts_restored
