# SPDX-License-Identifier: BSD-3-Clause
"""The layers and functions of ``apex.normalization``, on torch's own fused functions."""
