# SPDX-License-Identifier: BSD-3-Clause
"""Apex's optimizers on every device: thin classes over the update rules of the op table."""
