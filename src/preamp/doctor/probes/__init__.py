# SPDX-License-Identifier: BSD-3-Clause
"""Wrappers and hooks that tell the doctor what a script does."""
