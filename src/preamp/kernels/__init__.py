# SPDX-License-Identifier: BSD-3-Clause
"""Stateless arithmetic on lists of tensors, by back end."""

from preamp.kernels.dispatch import BACKENDS as BACKENDS
from preamp.kernels.dispatch import backend as backend
from preamp.kernels.dispatch import explain as explain
from preamp.kernels.foreach_types import ForeachType as ForeachType
from preamp.kernels.ops import OP_NAMES as OP_NAMES
from preamp.kernels.ops import Census as Census
from preamp.kernels.ops import Ops as Ops
from preamp.kernels.rules import AdagradRule as AdagradRule
from preamp.kernels.rules import AdamRule as AdamRule
from preamp.kernels.rules import BiasCorrection as BiasCorrection
from preamp.kernels.rules import LambRule as LambRule
from preamp.kernels.rules import LarsRule as LarsRule
from preamp.kernels.rules import NovoGradRule as NovoGradRule
from preamp.kernels.rules import Rule as Rule
from preamp.kernels.rules import Scalar as Scalar
from preamp.kernels.rules import SgdRule as SgdRule
from preamp.kernels.rules import Update as Update
from preamp.kernels.wide_half import cpu_lacks_matmul as cpu_lacks_matmul
