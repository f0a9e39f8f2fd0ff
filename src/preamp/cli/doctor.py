# SPDX-License-Identifier: BSD-3-Clause
"""``preamp doctor``: run a program and report usage bugs of mixed precision.

Like ``preamp run`` it leaves the program's arguments, exit status and tracebacks as they are.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, TextIO

from typer import Context, Option

from preamp.cli.console import refuse, refusing
from preamp.cli.run import IsModule, Program, ProgramName, execute, prepare
from preamp.core.errors import bad_value, message
from preamp.doctor import (
    RULES,
    Examination,
    Severity,
    explain_text,
    list_text,
    report_json,
    report_text,
    select_rules,
)


def doctor(
    context: Context,
    program: ProgramName = None,
    is_module: IsModule = False,
    is_list: Annotated[bool, Option("--list", help="Print all rules, and stop.")] = False,
    explain: Annotated[
        str | None, Option(metavar="ID", help="Print all about one rule, and stop.")
    ] = None,
    file: Annotated[
        str | None, Option("--json", metavar="FILE", help="Write the findings; - is stdout.")
    ] = None,
    strict: Annotated[
        bool, Option("--strict", help="Exit with status 1 on warnings and errors.")
    ] = False,
    steps: Annotated[
        int | None, Option(min=1, help="Stop the program after so many optimizer steps.")
    ] = None,
    select: Annotated[
        list[str] | None, Option(metavar="IDS", help="Only these rules: PA1,PA301.")
    ] = None,
    ignore: Annotated[list[str] | None, Option(metavar="IDS", help="All rules but these.")] = None,
) -> None:
    """Run a training program and report usage bugs of mixed precision.

    It is run as by preamp run, with the name apex supplied by preamp, and computes the same
    numbers as without. The report goes to standard error when it ends. Options come before the
    program.
    """
    if is_list:
        print(list_text(tuple(RULES.values())), end="")
    elif explain is not None:
        _explain(explain)
    else:
        with refusing():
            rules = select_rules(_ids("--select", select), _ids("--ignore", ignore))
        context.obj.append(
            lambda: _examine(
                prepare(program or [], "doctor", is_module=is_module),
                Examination(rules, steps=steps),
                _open(file),
                is_strict=strict,
            )
        )


def _examine(
    program: Program, examination: Examination, out: TextIO | None, *, is_strict: bool
) -> None:
    """Run a program, whose exit and whatever else it raises is passed on, and report at the end.

    If it is to be strict, a program that ends well and has a finding of severity warning or more
    ends with status 1.
    """
    process = os.getpid()
    # As the last of all, after the traceback that Python prints of what is passed on.
    atexit.register(_report, examination, out, process)
    try:
        with examination.watching():
            execute(program)
            _wait_for_threads()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    least = Severity.WARNING.rank
    found = any(finding.severity.rank >= least for finding in examination.findings)
    if is_strict and found and os.getpid() == process:
        raise SystemExit(1)


def _ids(option: str, given: Sequence[str] | None) -> list[str]:
    ids = [part.strip().upper() for text in given or () for part in text.split(",")]
    ids = [part for part in ids if part]
    if given and not ids:
        raise bad_value(
            f"{option} {given[0]!r} names no rule",
            "It takes ids, or beginnings of ids, separated by commas: PA1,PA301",
            f"Name one, or leave out {option} for all",
        )
    return ids


def _explain(rule: str) -> None:
    rule = rule.strip().upper()
    if rule not in RULES:
        known = ", ".join(RULES)
        refuse(message(f"There is no rule {rule!r}", f"Rules are {known}", "Name one of them"))
    print(explain_text(RULES[rule]), end="")


def _wait_for_threads() -> None:
    """Wait for what Python would wait for before it exits; it may be the training."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _open(file: str | None) -> TextIO | None:
    """Open what ``--json`` names before the program runs, which may take hours.

    For ``-`` it is what standard output was; from now on the process and its children write their
    own output to standard error. ``None`` where nothing is to be written; `SystemExit` (status 2)
    if the file cannot be.
    """
    if file is None or not _speaks():
        return None
    if file == "-":
        sys.stdout.flush()
        out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        return out
    try:
        return open(file, "w", encoding="utf-8")
    except OSError as error:
        got = f"{file} cannot be written: {error.strerror}"
        refuse(message(got, "--json takes a file, or - for standard output", "Pass another"))


def _speaks() -> bool:
    """Whether this process reports; of several ranks the first one does."""
    return os.environ.get("RANK", "0") == "0"


def _report(examination: Examination, out: TextIO | None, process: int) -> None:
    """Print the report, and write it to ``out``; a fork of ``process`` has nothing to report."""
    if not _speaks() or os.getpid() != process:
        return
    sys.stdout.flush()
    print(f"\n{report_text(examination)}", end="", file=sys.stderr, flush=True)
    if out is not None:
        with out:
            json.dump(report_json(examination), out, indent=2, allow_nan=False)
            out.write("\n")
