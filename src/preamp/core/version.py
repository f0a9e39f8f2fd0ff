# SPDX-License-Identifier: BSD-3-Clause
"""The version, in one place: the package, its build and the records of runs read it here."""

__version__ = "0.1.0.dev0"
