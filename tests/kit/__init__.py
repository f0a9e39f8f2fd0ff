# SPDX-License-Identifier: BSD-3-Clause
"""What tests are written in: trainings in a line, tables of refusals, comparisons."""
