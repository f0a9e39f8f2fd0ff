# SPDX-License-Identifier: BSD-3-Clause
"""``preamp plan``: a script's model, watched and tried, and the level to take."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import typer
from torch import nn

import preamp
from preamp.cli.console import only_answer_on_stdout, refused
from preamp.core.errors import PreampError, bad_value
from preamp.planning.cases import CASES, case_named
from preamp.planning.planner import POLICIES, why_not_called

_MODULE = "preamp_planned_script"
T = TypeVar("T")


def plan(
    script: Annotated[Path | None, typer.Argument(help="Python file that makes the model.")] = None,
    names: Annotated[
        str, typer.Option(help="A function that makes all, or model,loss_fn,batch[,optimizer].")
    ] = "make",
    case: Annotated[
        str | None, typer.Option(help=f"A built-in example instead: {', '.join(CASES)}.")
    ] = None,
    levels: Annotated[str | None, typer.Option(help="Opt levels to look at.")] = None,
    steps: Annotated[int, typer.Option(help="Float32 steps to watch.")] = 4,
    verify_steps: Annotated[int, typer.Option(help="Steps to try levels with; 0 for none.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Recommend an opt level and a loss scale, by watching float32 steps and trying.

    The script is run; it defines make() -> (model, loss_fn, batch) or (model, loss_fn, batch,
    optimizer), where loss_fn(model, batch) returns a scalar loss.
    """
    try:
        with only_answer_on_stdout(is_wanted=as_json):
            parts = _parts(script, names, case)
            wanted = None if levels is None else _levels(levels)
            report = preamp.plan(*parts, levels=wanted, steps=steps, verify_steps=verify_steps)
    except (ValueError, TypeError, PreampError) as error:
        if not _is_ours(error):  # a bug in the script: its traceback tells more
            raise
        raise refused(error) from None
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        typer.echo(str(report))


def _levels(text: str) -> list[str]:
    """Split at commas and spaces, except where a name has spaces itself."""
    parts = [part.strip() for part in text.strip(", ").split(",")]
    return [name for part in parts for name in ([part] if part in POLICIES else part.split())]


def _parts(script: Path | None, names: str, case: str | None) -> Sequence[Any]:
    if (script is None) == (case is None):
        raise bad_value(
            "Got both a script and --case" if case else "Got neither a script nor --case",
            "One of them says what is planned",
            "Call preamp plan script.py, or preamp plan --case stable",
        )
    if script is None:
        return case_named(case or "").make()
    wanted = [name.strip() for name in names.split(",")]
    if len(wanted) not in (1, 3, 4) or not all(wanted):
        raise bad_value(
            f"Got --names {names}",
            "It is the name of one function that makes all, or model,loss_fn,batch, and if "
            "there is one the optimizer, in this order",
            "Pass for example --names model,loss_fn,batch",
        )
    module = _run(script)
    given = [_attribute(module, script, name) for name in wanted]
    return given if len(given) > 1 else _made_by(given[0], wanted[0], script)


def _made_by(function: Any, name: str, script: Path) -> Sequence[Any]:
    """Call the one function that makes all."""
    got = ""
    if isinstance(function, (nn.Module, type)) or not callable(function):
        kind = function if isinstance(function, type) else type(function)
        got = f"{name} in {script} is {kind.__name__}, not a function that makes all"
    elif why_not_called(function):
        got = f"{name}() in {script} takes arguments"
    if got:
        raise bad_value(
            got,
            "One name is that of a function without arguments that returns model, loss_fn, "
            "batch, and if there is one the optimizer",
            "Name such a function, or all three or four, as --names model,loss_fn,batch",
        )
    found: Any = _without_exit(function, script)
    if isinstance(found, (list, tuple)) and len(found) in (3, 4):  # pyright: ignore[reportUnknownArgumentType]
        return found  # pyright: ignore[reportUnknownVariableType]
    raise bad_value(
        f"{name}() in {script} returned something else than three or four objects",
        "Needed are model, loss_fn, batch, and if there is one the optimizer",
        "Return them in this order, or name them by --names model,loss_fn,batch",
    )


def _without_exit(call: Callable[[], T], script: Path) -> T:
    """Call what belongs to a script, which must not end the plan as if it were done."""
    try:
        return call()
    except SystemExit as error:
        raise bad_value(
            f"{script} ended itself by sys.exit({error.code!r})",
            "It is run for what it defines, under another name than __main__ and without arguments",
            'Put what parses arguments and trains under if __name__ == "__main__":',
        ) from None


def _run(script: Path) -> ModuleType:
    """Run a script under a name of its own, so that its ``__main__`` part stays out."""
    if not script.is_file():
        raise bad_value(
            f"There is no file {str(script)!r}", "It runs one Python file", "Check the path"
        )
    spec = importlib.util.spec_from_file_location(_MODULE, script)
    if spec is None or spec.loader is None:
        raise bad_value(f"{str(script)!r} is no Python file", "Its name ends in .py", "Rename it")
    sys.path.insert(0, str(script.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses look their module up
    loader, arguments = spec.loader, sys.argv
    sys.argv = [str(script)]  # this command's own are not for it
    try:
        _without_exit(lambda: loader.exec_module(module), script)
    finally:
        sys.argv = arguments
    return module


def _is_ours(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return name.startswith("preamp.")


def _attribute(module: ModuleType, script: Path, name: str) -> Any:
    name = name.strip()
    if hasattr(module, name):
        return getattr(module, name)
    raise bad_value(
        f"{script} defines no {name!r}",
        "It defines make(), or what --names says",
        "Add def make(): return model, loss_fn, batch, optimizer",
    )
