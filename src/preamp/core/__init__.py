# SPDX-License-Identifier: BSD-3-Clause
"""Small things every room needs; nothing here knows the rest of preamp."""
