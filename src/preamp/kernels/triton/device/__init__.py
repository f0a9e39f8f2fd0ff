# SPDX-License-Identifier: BSD-3-Clause
"""Kernels: code in Triton's language, which only looks like Python.

Names in capitals are known when a kernel is compiled. ``P``, ``G``, ``M``, ``V``, ``H`` are the
dtypes of parameters, gradients, state and halves; all is computed in float32. A scalar argument
``x`` comes with ``x_at`` and ``X_AT``: where on the device it is, if it is there. Type checkers
cannot judge this language, so this folder and `preamp.kernels.triton.updates` are exempt from
strict checks.
"""
