# SPDX-License-Identifier: BSD-3-Clause
"""The room that wires the others: initialize, the engine, scale_loss, step."""

from preamp.engine.block import scale_loss as scale_loss
from preamp.engine.clipping import clip_grad_norm_ as clip_grad_norm_
from preamp.engine.clipping import clip_grad_value_ as clip_grad_value_
from preamp.engine.engine import Engine as Engine
from preamp.engine.grad_scaler import GradScaler as GradScaler
from preamp.engine.initialize import create_engine as create_engine
from preamp.engine.initialize import initialize as initialize
from preamp.engine.initialize import start as start
from preamp.engine.lookup import as_optimizers as as_optimizers
from preamp.engine.lookup import common_engine as common_engine
from preamp.engine.lookup import engine_of as engine_of
from preamp.engine.lookup import find_engine as find_engine
from preamp.engine.lookup import master_params as master_params
from preamp.engine.lookup import serve_imitations as serve_imitations
from preamp.engine.overflow import OverflowCause as OverflowCause
from preamp.engine.recording import Recording as Recording
from preamp.engine.schedulers import step_scheduler as step_scheduler
