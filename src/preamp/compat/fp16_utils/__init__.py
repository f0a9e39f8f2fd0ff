# SPDX-License-Identifier: BSD-3-Clause
"""``apex.fp16_utils``: mixed precision by hand, from before ``amp``."""
