# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.lists``: the op table as lists that scripts edit before ``amp.initialize``."""

from preamp.compat.lists.edits import edits_for as edits_for
