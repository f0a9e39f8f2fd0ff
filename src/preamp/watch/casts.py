# SPDX-License-Identifier: BSD-3-Clause
"""The cast audit as users see it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from preamp.casting import CastAudit
from preamp.core.dtypes import dtype_name

if TYPE_CHECKING:
    from preamp.numerics import CastRecord


@contextmanager
def audit_casts() -> Generator[list[CastRecord]]:
    """List what functions cast inside the block, for O1 and O4, and constants clamped to half.

    Every engine's casts in the process are seen, on every thread. A weight counts in each call,
    also where autocast's cache held its cast; casts inside compiled code are not seen. Numbers are
    not changed; each cast costs a walk up the stack.

    Yields:
        A list that is filled when the block ends, most bytes first.
    """
    audit = CastAudit()
    records: list[CastRecord] = []
    audit.start()
    try:
        yield records
    finally:
        audit.stop()
        records += cast_records(audit)


def cast_records(audit: CastAudit) -> list[CastRecord]:
    """Return what ``audit`` has counted so far, most bytes first."""
    from preamp.numerics import CastRecord

    records = [
        CastRecord(
            function=site.function,
            source=dtype_name(site.source),
            target=dtype_name(site.target),
            calls=calls,
            bytes=audit.elements[site] * (site.source.itemsize + site.target.itemsize),
            where=site.where,
            note=site.note,
        )
        for site, calls in list(audit.calls.items())  # other threads may be counting
    ]
    return sorted(records, key=lambda record: (-record.bytes, record.where, record.function))
