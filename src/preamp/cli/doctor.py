# SPDX-License-Identifier: BSD-3-Clause
"""``preamp doctor``: run a program and report usage bugs of mixed precision.

Like ``preamp run`` it needs neither rich nor typer, and leaves the program's arguments,
exit status and tracebacks as they are.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from preamp.cli.run import CANNOT_START, execute, prepare
from preamp.core.errors import message
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

USAGE = """preamp doctor [options] script.py [argument ...]
       preamp doctor [options] -m module [argument ...]
       preamp doctor --list
       preamp doctor --explain ID"""

_DESCRIPTION = """Run a program as preamp run does, with the name apex supplied by preamp, watch
its training, and report usage bugs of mixed precision on standard error when it ends. The
program computes the same numbers as without. Options come before the program."""


def run_doctor(arguments: list[str]) -> None:
    """Run ``preamp doctor``.

    Args:
        arguments: What follows ``preamp doctor`` on the command line.

    Raises:
        SystemExit: With status 1 under ``--strict`` if anything of severity warning or more was
            found and the program itself ended well; 2 if something on the command line is wrong.
            The program's own is passed on.
        BaseException: Whatever else the program raised.
    """
    options = _parser().parse_args(arguments)
    if options.list:
        print(list_text(tuple(RULES.values())), end="")
        return
    if options.explain is not None:
        _explain(options.explain)
        return
    try:
        rules = select_rules(_ids(options.select), _ids(options.ignore))
    except ValueError as error:
        _refuse(str(error))
    program = prepare(["-m", *options.module] if options.module else options.program)
    examination = Examination(rules, steps=options.steps)
    process = os.getpid()
    try:
        with examination.watching():
            execute(program)
            _wait_for_threads()
    except SystemExit as error:
        if os.getpid() == process:
            _report(examination, options.json)
            if error.code in (None, 0):
                _be_strict(examination, is_strict=options.strict)
        raise
    except BaseException:
        if os.getpid() == process:  # a fork that ends here has nothing to report
            # Printed after the traceback, which Python prints when this has been passed on.
            atexit.register(_report, examination, options.json)
        raise
    _report(examination, options.json)
    _be_strict(examination, is_strict=options.strict)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamp doctor", usage=USAGE, description=_DESCRIPTION, allow_abbrev=False
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print all rules, and stop")
    add("--explain", metavar="ID", help="print all about one rule, and stop")
    add("--json", metavar="FILE", help="also write the findings to FILE")
    add("--strict", action="store_true", help="exit with status 1 on warnings and errors")
    add("--steps", metavar="N", type=_count, help="stop the program after N optimizer steps")
    add("--select", metavar="IDS", action="append", help="only these rules: PA1,PA301")
    add("--ignore", metavar="IDS", action="append", help="all rules but these")
    add("-m", dest="module", metavar="module", nargs=argparse.REMAINDER, help="run a module")
    add("program", metavar="script.py", nargs=argparse.REMAINDER, help="and its arguments")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _ids(given: Sequence[str] | None) -> list[str]:
    return [part.strip() for text in given or () for part in text.split(",")]


def _explain(rule: str) -> None:
    if rule not in RULES:
        known = ", ".join(RULES)
        _refuse(message(f"There is no rule {rule!r}", f"Rules are {known}", "Name one of them"))
    print(explain_text(RULES[rule]), end="")


def _refuse(text: str) -> NoReturn:
    print(f"Error: {text}", file=sys.stderr)
    raise SystemExit(CANNOT_START)


def _wait_for_threads() -> None:
    """Wait for what Python would wait for before it exits; it may be the training."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _report(examination: Examination, file: str | None) -> None:
    """Print and write the report; of several ranks, the first one speaks."""
    if os.environ.get("RANK", "0") != "0":
        return
    sys.stdout.flush()
    print(f"\n{report_text(examination)}", end="", file=sys.stderr, flush=True)
    if file is not None:
        try:
            with open(file, "w", encoding="utf-8") as out:
                json.dump(report_json(examination), out, indent=2, allow_nan=False)
                out.write("\n")
        except OSError as error:
            got = f"{file} cannot be written: {error.strerror}"
            do = "The findings are above; pass another file to --json"
            print(f"Error: {message(got, '--json takes a file', do)}", file=sys.stderr)


def _be_strict(examination: Examination, *, is_strict: bool) -> None:
    least = Severity.WARNING.rank
    if is_strict and any(f.severity.rank >= least for f in examination.findings):
        raise SystemExit(1)
