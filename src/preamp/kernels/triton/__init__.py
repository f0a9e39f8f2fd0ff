# SPDX-License-Identifier: BSD-3-Clause
"""Multi-tensor kernels in Triton, for CUDA, ROCm and XPU devices.

An op takes a fixed number of launches for each combination of dtypes, however many tensors there
are: kernels find them through a table of device pointers (see `preamp.kernels.triton.tables`).
``census`` and norms take two, per chunk and per tensor; rules that need norms add theirs; all other
ops take one. Nothing waits for the device. Tensors may lie in memory in any order of dimensions
and at any address; aligned ones are accessed 16 bytes at a time.

What no kernel can walk goes to the plain back end: float64, sparse and complex gradients, other
dtypes, memory with gaps, wrappers such as ``DTensor``, and places whose tensors differ in strides
or device. That does not wait either, except that torch itself does where it sums the duplicates of
sparse gradients.
Moments that are rounded by chance or kept in blocks are walked in the order of indices alone, so
other orders go there too; elements of split parameters are joined and split within the update.

With ``TRITON_INTERPRET=1`` in the environment before the first import, kernels run on CPU tensors,
slowly, and on nothing else. Tensors on devices that kernels cannot run on are refused.

Two kinds of difference from the plain back end exceed single roundings: sums behind norms depend on
their order, which is fixed here, and before Triton 3.6 quotients and roots below float32's normal
range become zero on CUDA.
"""

from preamp.kernels.triton.ops import Triton as Triton
