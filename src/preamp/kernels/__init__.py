# SPDX-License-Identifier: BSD-3-Clause
"""Stateless arithmetic on lists of tensors, by back end."""

from preamp.kernels.by_device import lamb_norms as lamb_norms
from preamp.kernels.dispatch import BACKENDS as BACKENDS
from preamp.kernels.dispatch import backend as backend
from preamp.kernels.dispatch import explain as explain
from preamp.kernels.ops import OP_NAMES as OP_NAMES
from preamp.kernels.ops import Census as Census
from preamp.kernels.ops import Ops as Ops
from preamp.kernels.plans import Standing as Standing
from preamp.kernels.rules import Rule as Rule
from preamp.kernels.staged import at_hand as at_hand
from preamp.kernels.staged import check_not_captured as check_not_captured
from preamp.kernels.staged import holding as holding
from preamp.kernels.staged import reserve as reserve
from preamp.kernels.update import Scalar as Scalar
from preamp.kernels.update import Update as Update
from preamp.kernels.wide_half import cpu_lacks_matmul as cpu_lacks_matmul
