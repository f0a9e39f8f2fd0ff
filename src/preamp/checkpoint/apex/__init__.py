# SPDX-License-Identifier: BSD-3-Clause
"""Files that scripts wrote with Apex: read without running anything, and turned into plain data."""
