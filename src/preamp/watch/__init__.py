# SPDX-License-Identifier: BSD-3-Clause
"""What watches an engine: the tracer, the recorder, and counts of memory and casts."""

from preamp.watch.casts import audit_casts as audit_casts
from preamp.watch.inventory import count_memory as count_memory
from preamp.watch.makers import make_watchers as make_watchers
