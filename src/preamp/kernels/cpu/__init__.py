# SPDX-License-Identifier: BSD-3-Clause
"""Blocks that stay in a CPU's cache, with torch's fused kernels inside where they fit.

Every tensor is walked through in blocks, many small tensors share one, and whatever has to happen
to a block happens while it is in the cache: memory is read and written once. Tensors that are not
dense, or lie in another order than their gradients, and sparse or complex ones take the reference
back end instead, one by one. Scalars on the CPU are read at once, which waits for nobody.
"""

from preamp.kernels.cpu.adagrad import adagrad_ as adagrad_
from preamp.kernels.cpu.adam import adam_ as adam_
from preamp.kernels.cpu.elementwise import axpby_ as axpby_
from preamp.kernels.cpu.elementwise import cast_copy_ as cast_copy_
from preamp.kernels.cpu.elementwise import scale_add_ as scale_add_
from preamp.kernels.cpu.elementwise import widen_add as widen_add
from preamp.kernels.cpu.reductions import census as census
from preamp.kernels.cpu.reductions import l2norm as l2norm
from preamp.kernels.cpu.reductions import l2norms as l2norms
from preamp.kernels.cpu.sgd import sgd_ as sgd_
from preamp.kernels.cpu.sizes import name as name
from preamp.kernels.cpu.with_norms import lamb_ as lamb_
from preamp.kernels.cpu.with_norms import lamb_norms as lamb_norms
from preamp.kernels.cpu.with_norms import lars_ as lars_
from preamp.kernels.cpu.with_norms import novograd_ as novograd_
