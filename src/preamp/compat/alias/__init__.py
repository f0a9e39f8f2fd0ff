# SPDX-License-Identifier: BSD-3-Clause
"""The name ``apex``, answered by preamp: a table, a finder that reads it, and on and off."""

from preamp.compat.alias.finder import install_apex_alias as install_apex_alias
from preamp.compat.alias.finder import remove_apex_alias as remove_apex_alias
