# SPDX-License-Identifier: BSD-3-Clause
"""Measurements of preamp against the same written by hand; for a clone, not in the wheel."""
