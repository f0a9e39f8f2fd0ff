# SPDX-License-Identifier: BSD-3-Clause
"""What torch has no public name for: one file for each subject, and private names nowhere else.

Only `preamp.kernels` calls private functions of torch besides: those on lists of tensors.
"""
