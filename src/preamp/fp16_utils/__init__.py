# SPDX-License-Identifier: BSD-3-Clause
"""The names of ``apex.fp16_utils``: migrating is ``from preamp.fp16_utils import *``."""

from preamp.compat.fp16_utils.modules import BN_convert_float as BN_convert_float
from preamp.compat.fp16_utils.modules import FP16Model as FP16Model
from preamp.compat.fp16_utils.modules import convert_module as convert_module
from preamp.compat.fp16_utils.modules import convert_network as convert_network
from preamp.compat.fp16_utils.modules import network_to_half as network_to_half
from preamp.compat.fp16_utils.modules import tofp16 as tofp16
from preamp.compat.fp16_utils.optimizer import FP16_Optimizer as FP16_Optimizer
from preamp.compat.fp16_utils.param_lists import clip_grad_norm as clip_grad_norm
from preamp.compat.fp16_utils.param_lists import (
    master_params_to_model_params as master_params_to_model_params,
)
from preamp.compat.fp16_utils.param_lists import (
    model_grads_to_master_grads as model_grads_to_master_grads,
)
from preamp.compat.fp16_utils.param_lists import prep_param_lists as prep_param_lists
from preamp.compat.fp16_utils.param_lists import to_python_float as to_python_float
from preamp.compat.fp16_utils.scalers import DynamicLossScaler as DynamicLossScaler
from preamp.compat.fp16_utils.scalers import LossScaler as LossScaler

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
