# SPDX-License-Identifier: BSD-3-Clause
"""The rules and their detectors, one file for each family."""
