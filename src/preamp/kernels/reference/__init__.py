# SPDX-License-Identifier: BSD-3-Clause
"""Plain torch operations; the definition of every op. See `preamp.kernels.ops`."""

from preamp.kernels.reference.adagrad import adagrad_ as adagrad_
from preamp.kernels.reference.adam import adam_ as adam_
from preamp.kernels.reference.lamb import lamb_ as lamb_
from preamp.kernels.reference.lamb import lamb_norms as lamb_norms
from preamp.kernels.reference.lars import lars_ as lars_
from preamp.kernels.reference.novograd import novograd_ as novograd_
from preamp.kernels.reference.ops import axpby_ as axpby_
from preamp.kernels.reference.ops import cast_copy_ as cast_copy_
from preamp.kernels.reference.ops import census as census
from preamp.kernels.reference.ops import l2norm as l2norm
from preamp.kernels.reference.ops import l2norms as l2norms
from preamp.kernels.reference.ops import name as name
from preamp.kernels.reference.ops import scale_add_ as scale_add_
from preamp.kernels.reference.ops import widen_add as widen_add
from preamp.kernels.reference.sgd import sgd_ as sgd_
