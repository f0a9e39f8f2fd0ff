# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.lists``: the op table as lists to look at."""

from preamp.compat.lists.names import check_unchanged as check_unchanged
