# SPDX-License-Identifier: BSD-3-Clause
"""``preamp run``: a program written for Apex, unchanged, as plain Python would run it.

``runpy`` is not enough: its ``__main__`` is gone when the program has ended but its threads and
exit handlers have not, ``__file__`` stays relative, and its frames show in tracebacks.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn, cast

import preamp
from preamp.cli.tracebacks import begin_tracebacks
from preamp.core.errors import PreampStateError, message
from preamp.engine.asked import ask

_CALLS = """Usage: preamp run [--history FILE] [--numerics light|full] script.py [argument ...]
       preamp run [--history FILE] [--numerics light|full] -m module [argument ...]"""
_HELP = (
    "Run a program that imports apex, amp_C or apex_C, with these names supplied by preamp. "
    "What follows the script or the module is the program's own. --history and --numerics take "
    "the place of these arguments of preamp.initialize, whatever the program passes. "
    "Under torchrun:"
)
_RANKS = "  torchrun --nproc-per-node 2 -m preamp run script.py"

REFUSED = 2  # exit status where nothing was done, as Python's own for what it cannot open


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is to become ``__main__``."""

    code: CodeType
    attributes: dict[str, Any]


def refuse(why: object) -> NoReturn:
    """End the command, and say why nothing was done."""
    print(f"Error: {why}", file=sys.stderr)
    raise SystemExit(REFUSED) from None


def run(arguments: list[str]) -> None:
    """Run a script or a module as ``__main__``, with the alias on; what it raises is passed on.

    ``arguments`` follow ``preamp run`` on the command line. Raises `SystemExit` with status 2 for
    what cannot be started. Mutates ``sys.argv``, ``sys.path``, ``sys.modules["__main__"]``,
    ``sys.excepthook``, and what `preamp.install_apex_alias` does.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        paragraph = textwrap.fill(_HELP, shutil.get_terminal_size().columns)
        print(_CALLS, paragraph, _RANKS, sep="\n\n")
        return
    arguments = _ask(arguments)
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    execute(prepare(arguments))


def _ask(arguments: list[str]) -> list[str]:
    """Ask for what the first options say, and return the rest."""
    asked = dict[str, str]()
    while arguments and arguments[0].partition("=")[0] in ("--history", "--numerics"):
        name, is_said, value = arguments[0].partition("=")
        if not is_said:
            value = arguments[1] if len(arguments) > 1 else ""
        asked[name[2:]] = value
        arguments = arguments[1 if is_said else 2 :]
    try:
        ask(**asked)
    except (TypeError, ValueError) as error:
        refuse(error)
    return arguments


def prepare(arguments: list[str], command: str = "run") -> Program:
    """Read a script, or after ``-m`` a module, and set up the process for it.

    ``command`` is what error messages say to call. Raises `SystemExit` if it could not be read
    (status 2), or is no Python (status 1). Mutates ``sys.argv``, ``sys.path``, and what
    `preamp.install_apex_alias` does.
    """
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        _start("-m", os.getcwd(), arguments[2:])
        program = _read_module(arguments[1], command)
        sys.argv[0] = program.attributes["__file__"]
        return program
    if arguments and not arguments[0].startswith("-"):
        if not os.path.isfile(arguments[0]):
            _stop(f"There is no file {arguments[0]!r}", command)
        _start(arguments[0], os.path.dirname(os.path.realpath(arguments[0])), arguments[1:])
        return read_script(os.path.abspath(arguments[0]))
    _stop(f"Got {' '.join(arguments[:1]) or 'nothing'} in place of a program", command)


def execute(program: Program) -> None:
    """Run ``program`` as ``__main__``; whatever it raises goes on to the caller.

    Mutates ``sys.modules["__main__"]`` and ``sys.excepthook``.
    """
    main = ModuleType("__main__")
    vars(main).update(program.attributes, __builtins__=builtins)
    sys.modules["__main__"] = main
    # As without ``preamp run``
    begin_tracebacks(lambda frame: frame.f_code is program.code)
    exec(program.code, vars(main))


def _start(name: str, folder: str, arguments: list[str]) -> None:
    """Set up the process as Python does before it reads the program."""
    sys.argv[:] = [name, *arguments]
    # With -P or PYTHONSAFEPATH (Python 3.11 on) Python puts no folder first.
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        sys.path[0] = folder
    try:
        preamp.install_apex_alias()
    except PreampStateError as error:
        refuse(error)


def read_script(path: str) -> Program:
    """Read a Python file; raises `SystemExit` (status 1) where it is none, and says why."""
    loader = SourceFileLoader("__main__", path)
    code = _compiled(loader, lambda: loader.source_to_code(loader.get_data(path), path))
    attributes = {"__file__": path, "__cached__": None, "__loader__": loader}
    return Program(code=code, attributes=attributes)


def _read_module(name: str, command: str) -> Program:
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    if spec is None or not hasattr(spec.loader, "get_code"):
        _stop(f"There is no module {name} that can be run", command)
    loader = cast("InspectLoader", spec.loader)
    code = _compiled(loader, lambda: loader.get_code(spec.name))
    attributes = {
        "__file__": code.co_filename,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
    }
    return Program(code=code, attributes=attributes)


def _compiled(loader: object, read: Callable[[], CodeType | None]) -> CodeType:
    """Read a program; a syntax error in it is shown as Python shows it."""
    try:
        _refuse_nul_bytes(loader)
        return cast("CodeType", read())
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        raise SystemExit(1) from None


def _refuse_nul_bytes(loader: object) -> None:
    """Raise the `SyntaxError` of a source file with a nul byte; Python's own names no place."""
    if isinstance(loader, SourceFileLoader):
        before, nul, _ = loader.get_data(loader.path).partition(b"\0")
        if nul:
            line = len((before + b".").splitlines())
            place = (loader.path, line, None, "")
            raise SyntaxError("source code cannot contain null bytes", place)


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # Missing is the module or a package around it, not something that the package imports.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _stop(got: str, command: str) -> NoReturn:
    allowed = "It runs one Python file, or one module named by -m"
    call = f"preamp {command}"
    do = f"Call {call} script.py, or {call} -m module; {call} --help says more"
    refuse(message(got, allowed, do))
