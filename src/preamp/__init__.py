# SPDX-License-Identifier: BSD-3-Clause
"""Mixed-precision training for PyTorch in one call.

``model, optimizer = preamp.initialize(model, optimizer, opt_level="O2")`` and
``with preamp.scale_loss(loss, optimizer) as scaled: scaled.backward()`` are all a training loop
needs. ``preamp.amp`` has the same under the names of NVIDIA Apex.
"""

from typing import TYPE_CHECKING

from preamp.casting import bfloat16_function as bfloat16_function
from preamp.casting import disable_casts as disable_casts
from preamp.casting import float_function as float_function
from preamp.casting import half_function as half_function
from preamp.casting import promote_function as promote_function
from preamp.casting import register_bfloat16_function as register_bfloat16_function
from preamp.casting import register_float_function as register_float_function
from preamp.casting import register_half_function as register_half_function
from preamp.casting import register_promote_function as register_promote_function
from preamp.compat.alias import install_apex_alias as install_apex_alias
from preamp.compat.alias import remove_apex_alias as remove_apex_alias
from preamp.core.errors import CheckpointError as CheckpointError
from preamp.core.errors import LossScaleError as LossScaleError
from preamp.core.errors import PreampError as PreampError
from preamp.core.errors import PreampPolicyError as PreampPolicyError
from preamp.core.errors import PreampStateError as PreampStateError
from preamp.core.errors import PreampUnavailableError as PreampUnavailableError
from preamp.core.late import names
from preamp.core.version import __version__ as __version__
from preamp.engine import Engine as Engine
from preamp.engine import GradScaler as GradScaler
from preamp.engine import OverflowCause as OverflowCause
from preamp.engine import clip_grad_norm_ as clip_grad_norm_
from preamp.engine import clip_grad_value_ as clip_grad_value_
from preamp.engine import engine_of as engine_of
from preamp.engine import initialize as initialize
from preamp.engine import master_params as master_params
from preamp.engine import scale_loss as scale_loss
from preamp.engine import step_scheduler as step_scheduler
from preamp.policy import OPT_LEVELS as OPT_LEVELS
from preamp.policy import Policy as Policy
from preamp.policy import Storage as Storage
from preamp.watch import audit_casts as audit_casts
from preamp.watch import count_memory as count_memory

if TYPE_CHECKING:
    from preamp import amp as amp
    from preamp import checkpoint as checkpoint
    from preamp import fp16_utils as fp16_utils
    from preamp import integrations as integrations
    from preamp import memory as memory
    from preamp import multi_tensor_apply as multi_tensor_apply
    from preamp import normalization as normalization
    from preamp import numerics as numerics
    from preamp import optimizers as optimizers
    from preamp import parallel as parallel
    from preamp import report as report
    from preamp.checkpoint.run_state import RunState as RunState
    from preamp.checkpoint.saving import load_checkpoint as load_checkpoint
    from preamp.checkpoint.saving import save_checkpoint as save_checkpoint
    from preamp.memory.estimates import estimate as estimate

__getattr__, __dir__ = names(  # what not every program needs loads when it is first asked for
    "preamp",
    RunState="checkpoint.run_state",
    amp="",
    checkpoint="",
    estimate="memory.estimates",
    fp16_utils="",
    integrations="",
    load_checkpoint="checkpoint.saving",
    memory="",
    multi_tensor_apply="",
    normalization="",
    numerics="",
    optimizers="",
    parallel="",
    report="",
    save_checkpoint="checkpoint.saving",
)

__all__ = [
    "OPT_LEVELS",
    "CheckpointError",
    "Engine",
    "GradScaler",
    "LossScaleError",
    "OverflowCause",
    "Policy",
    "PreampError",
    "PreampPolicyError",
    "PreampStateError",
    "PreampUnavailableError",
    "RunState",
    "Storage",
    "__version__",
    "audit_casts",
    "bfloat16_function",
    "clip_grad_norm_",
    "clip_grad_value_",
    "count_memory",
    "disable_casts",
    "engine_of",
    "estimate",
    "float_function",
    "half_function",
    "initialize",
    "install_apex_alias",
    "load_checkpoint",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "remove_apex_alias",
    "save_checkpoint",
    "scale_loss",
    "step_scheduler",
]
