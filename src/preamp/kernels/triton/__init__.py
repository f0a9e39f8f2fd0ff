# SPDX-License-Identifier: BSD-3-Clause
"""Triton."""

from preamp.kernels.triton.adagrad import adagrad_ as adagrad_
from preamp.kernels.triton.adam import adam_ as adam_
from preamp.kernels.triton.elementwise import axpby_ as axpby_
from preamp.kernels.triton.elementwise import cast_copy_ as cast_copy_
from preamp.kernels.triton.elementwise import scale_add_ as scale_add_
from preamp.kernels.triton.elementwise import widen_add as widen_add
from preamp.kernels.triton.lamb import lamb_ as lamb_
from preamp.kernels.triton.lars import lars_ as lars_
from preamp.kernels.triton.launch import name as name
from preamp.kernels.triton.novograd import novograd_ as novograd_
from preamp.kernels.triton.reductions import census as census
from preamp.kernels.triton.reductions import l2norm as l2norm
from preamp.kernels.triton.reductions import l2norms as l2norms
from preamp.kernels.triton.sgd import sgd_ as sgd_
