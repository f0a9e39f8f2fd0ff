# SPDX-License-Identifier: BSD-3-Clause
"""The package ``apex.contrib``, which has sub-packages only."""
