# SPDX-License-Identifier: BSD-3-Clause
"""The version of ``apex.amp``, which never changed; trainers probe for Apex by importing it."""

VERSION = (0, 1, 0)
__version__ = "0.1.0"
