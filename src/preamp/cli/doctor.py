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
from typing import TextIO

from preamp.cli.run import execute, prepare, refuse
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

USAGE = """preamp doctor [options] script.py [argument ...]
       preamp doctor [options] -m module [argument ...]
       preamp doctor --list
       preamp doctor --explain ID"""

_DESCRIPTION = """Run a program as preamp run does, with the name apex supplied by preamp, watch
its training, and report usage bugs of mixed precision on standard error when it ends. The
program computes the same numbers as without. Options come before the program."""


def run_doctor(arguments: list[str]) -> None:
    """Run ``preamp doctor`` with what follows it on the command line.

    Raises `SystemExit` with status 1 under ``--strict`` if anything of severity warning or more was
    found and the program itself ended well, with 2 if something on the command line is wrong. The
    program's own exit, and whatever else it raises, is passed on.
    """
    options = _parser().parse_args(arguments)
    if options.list:
        print(list_text(tuple(RULES.values())), end="")
        return
    if options.explain is not None:
        _explain(options.explain)
        return
    try:
        rules = select_rules(_ids("--select", options.select), _ids("--ignore", options.ignore))
    except ValueError as error:
        refuse(error)
    given = options.program[1:] if options.program[:1] == ["--"] else options.program
    program = prepare(["-m", *options.module] if options.module else given, "doctor")
    out = _open(options.json)
    examination = Examination(rules, steps=options.steps)
    process = os.getpid()
    try:
        with examination.watching():
            execute(program)
            _wait_for_threads()
    except SystemExit as error:
        if os.getpid() == process:
            _report(examination, out)
            if error.code in (None, 0):
                _be_strict(examination, is_strict=options.strict)
        raise
    except BaseException:
        if os.getpid() == process:  # a fork that ends here has nothing to report
            # Printed after the traceback, which Python prints when this has been passed on.
            atexit.register(_report, examination, out)
        raise
    _report(examination, out)
    _be_strict(examination, is_strict=options.strict)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamp doctor", usage=USAGE, description=_DESCRIPTION, allow_abbrev=False
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print all rules, and stop")
    add("--explain", metavar="ID", help="print all about one rule, and stop")
    add("--json", metavar="FILE", help="also write the findings to FILE; - is stdout")
    add("--strict", action="store_true", help="exit with status 1 on warnings and errors")
    add("--steps", metavar="N", type=_count, help="stop the program after N optimizer steps")
    add("--select", metavar="IDS", action="append", help="only these rules: PA1,PA301")
    add("--ignore", metavar="IDS", action="append", help="all rules but these")
    add("-m", dest="module", metavar="module", nargs=argparse.REMAINDER, help="run a module")
    add("program", metavar="script.py", nargs=argparse.REMAINDER, help="and its arguments")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            message(
                f"got {text!r}",
                "A run has at least 1 optimizer step",
                "Pass a whole number from 1 on, or leave out --steps to run to the end",
            )
        )
    return int(text)


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


def _report(examination: Examination, out: TextIO | None) -> None:
    """Print the report, and write it to ``out``."""
    if not _speaks():
        return
    sys.stdout.flush()
    print(f"\n{report_text(examination)}", end="", file=sys.stderr, flush=True)
    if out is not None:
        with out:
            json.dump(report_json(examination), out, indent=2, allow_nan=False)
            out.write("\n")


def _be_strict(examination: Examination, *, is_strict: bool) -> None:
    least = Severity.WARNING.rank
    if is_strict and any(f.severity.rank >= least for f in examination.findings):
        raise SystemExit(1)
