# SPDX-License-Identifier: BSD-3-Clause
"""torch's multi-tensor operations: few launches on any device, with bounded temporaries.

Tensors are joined to vectors of at most a block, computed on, and copied back. Those that are not
dense, or lie in another order than their gradients, and sparse or complex ones take the reference
back end instead, one by one. Nothing is read back to the host.
"""

from preamp.kernels.foreach.adagrad import adagrad_ as adagrad_
from preamp.kernels.foreach.adam import adam_ as adam_
from preamp.kernels.foreach.elementwise import axpby_ as axpby_
from preamp.kernels.foreach.elementwise import cast_copy_ as cast_copy_
from preamp.kernels.foreach.elementwise import scale_add_ as scale_add_
from preamp.kernels.foreach.elementwise import widen_add as widen_add
from preamp.kernels.foreach.lamb import lamb_ as lamb_
from preamp.kernels.foreach.lamb import lamb_norms as lamb_norms
from preamp.kernels.foreach.lars import lars_ as lars_
from preamp.kernels.foreach.novograd import novograd_ as novograd_
from preamp.kernels.foreach.reductions import census as census
from preamp.kernels.foreach.reductions import l2norm as l2norm
from preamp.kernels.foreach.reductions import l2norms as l2norms
from preamp.kernels.foreach.sgd import sgd_ as sgd_
from preamp.kernels.foreach.sizes import name as name
