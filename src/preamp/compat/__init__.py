# SPDX-License-Identifier: BSD-3-Clause
"""Apex's spellings of preamp, and the one piece of process-wide state that they need."""
