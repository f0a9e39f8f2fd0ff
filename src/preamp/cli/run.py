# SPDX-License-Identifier: BSD-3-Clause
"""``preamp run``: a program written for Apex, unchanged, as plain Python would run it.

``runpy`` is not enough: its ``__main__`` is gone when the program has ended but its threads and
exit handlers have not, ``__file__`` stays relative, and its frames show in tracebacks.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Annotated, Any, NoReturn, cast

from typer import Argument, Context, Option

import preamp
from preamp.cli.console import refuse
from preamp.core.errors import PreampStateError, message
from preamp.engine.initialize import ask

ProgramName = Annotated[
    list[str] | None,
    Argument(metavar="script.py [argument ...]", help="The program and what it is given."),
]
IsModule = Annotated[bool, Option("-m", help="Run a module, which stands for the script.")]

Program = tuple[CodeType, dict[str, Any]]
"""What is to become ``__main__``, and the attributes that it has before it runs."""


def run(
    context: Context,
    program: ProgramName = None,
    is_module: IsModule = False,
    history: Annotated[
        str | None, Option(metavar="FILE", help="Record the run into this file.")
    ] = None,
    numerics: Annotated[
        str | None, Option(metavar="light|full", help="Record statistics of tensors, too.")
    ] = None,
) -> None:
    """Run a program written for Apex, unchanged.

    The names apex, amp_C and apex_C are supplied by preamp. What follows the script or the module
    is the program's own. --history and --numerics take the place of these arguments of
    preamp.initialize, whatever the program passes. Under torchrun:
    torchrun --nproc-per-node 2 -m preamp run script.py
    """
    given = {"history": history, "numerics": numerics}
    try:
        ask(**{name: value for name, value in given.items() if value is not None})
    except (TypeError, ValueError) as error:
        refuse(error)
    context.obj.append(lambda: execute(prepare(program or [], "run", is_module=is_module)))


def prepare(given: list[str], command: str, *, is_module: bool) -> Program:
    """Read a script or a module, and set up the process for it.

    ``given`` is its name and what it is given, ``command`` what error messages say to call. Raises
    `SystemExit` if it could not be read (status 2), or is no Python (status 1). Mutates
    ``sys.argv``, ``sys.path``, and what `preamp.install_apex_alias` does.
    """
    if not given:
        _stop(f"Got {'-m' if is_module else 'nothing'} in place of a program", command)
    name, *arguments = given
    if is_module:
        _start("-m", os.getcwd(), arguments)
        program = _read_module(name, command)
        sys.argv[0] = program[1]["__file__"]
        return program
    if not os.path.isfile(name):
        _stop(f"There is no file {name!r}", command)
    _start(name, os.path.dirname(os.path.realpath(name)), arguments)
    return _read_script(os.path.abspath(name))


def execute(program: Program) -> None:
    """Run ``program`` as ``__main__``; whatever it raises goes on to the caller.

    Mutates ``sys.modules["__main__"]`` and ``sys.excepthook``.
    """
    code, attributes = program
    main = ModuleType("__main__")
    vars(main).update(attributes, __builtins__=builtins)
    sys.modules["__main__"] = main
    show = sys.excepthook

    def show_own(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
        own = own_part(trace, code)
        show(kind, error.with_traceback(own), own)

    sys.excepthook = cast("Any", show_own)
    exec(code, vars(main))


def own_part(trace: TracebackType, first: CodeType) -> TracebackType:
    """The part of a traceback that Python would show: from the frame of ``first`` on.

    Without that frame it is the whole. Frames of the commands further down are left out, too, but
    for the last ones, which raised.
    """
    parts: list[TracebackType] = []
    part: TracebackType | None = trace
    while part is not None:
        if parts or part.tb_frame.f_code is first:
            parts.append(part)
        part = part.tb_next
    shown: TracebackType | None = None
    for part in reversed(parts):
        name = f"{part.tb_frame.f_globals.get('__name__')}."
        if shown is None or not name.startswith(("preamp.cli.", "preamp.doctor.")):
            shown = TracebackType(shown, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return shown or trace


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


def _read_script(path: str) -> Program:
    """Read a Python file; raises `SystemExit` (status 1) where it is none, and says why."""
    loader = SourceFileLoader("__main__", path)
    code = _compiled(lambda: loader.source_to_code(loader.get_data(path), path))
    return code, {"__file__": path, "__cached__": None, "__loader__": loader}


def _read_module(name: str, command: str) -> Program:
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    if spec is None or not hasattr(spec.loader, "get_code"):
        _stop(f"There is no module {name} that can be run", command)
    loader = cast("InspectLoader", spec.loader)
    code = _compiled(lambda: loader.get_code(spec.name))
    return code, {
        "__file__": code.co_filename,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
    }


def _compiled(read: Callable[[], CodeType | None]) -> CodeType:
    """Read a program; a syntax error in it is shown as Python shows it."""
    try:
        return cast("CodeType", read())
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        raise SystemExit(1) from None


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
