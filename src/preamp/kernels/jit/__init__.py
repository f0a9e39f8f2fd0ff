# SPDX-License-Identifier: BSD-3-Clause
"""Kernels for CPUs that numba compiles at first use; no compiler has to be on the machine.

One launch for each combination of dtypes walks a table of addresses, whatever the number of
tensors: it reads half gradients, updates float32 masters and rounds them into half weights in one
pass over memory, which none of torch's operations does. Tensors may lie in memory in any order of
dimensions. What no kernel can walk goes to ``plain``, one tensor at a time: sparse and complex
gradients, other dtypes, memory with gaps, wrappers, and places whose tensors differ in strides.

Values on a CPU are read at once, which waits for nobody: with an overflow nothing is launched.

Every operation is rounded on its own, as IEEE says. Results differ from those of ``plain`` in sums,
whose order is fixed here, and where torch's square roots are not rounded correctly.
"""

from preamp.kernels.jit.ops import Jit as Jit
