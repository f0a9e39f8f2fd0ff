# SPDX-License-Identifier: BSD-3-Clause
"""Cases with a known truth for attribution, and how many come right.

Each module of a tool has ``scores(every, offset) -> list[Score]``. Tests run a part of the cases.
"""
