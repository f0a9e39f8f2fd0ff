# SPDX-License-Identifier: BSD-3-Clause
"""preamp in training frameworks, at their own seams; each module imports its framework."""
