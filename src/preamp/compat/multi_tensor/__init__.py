# SPDX-License-Identifier: BSD-3-Clause
"""Apex's operations on lists of tensors, on every device, under the names of its C++ modules.

Here are the signatures, the checks and the flags of Apex; the arithmetic is that of
`preamp.kernels`.
"""
