# SPDX-License-Identifier: BSD-3-Clause
"""``preamp plan``: a script's model, watched and tried, and the level to take."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar, cast

import typer
from torch import nn

import preamp
from preamp.cli.console import (
    make_console,
    only_answer_on_stdout,
    print_table,
    print_wrapped,
    refusing,
)
from preamp.cli.options import (
    NEEDS_ALL_GRADIENTS,
    AsJson,
    PlaceName,
    Releases,
    StorageName,
    keeping_gradients,
    storage_of,
)
from preamp.cli.run import read_script, refuse
from preamp.cli.tracebacks import begin_tracebacks, is_foreign
from preamp.core.errors import PreampError, PreampStateError, bad_value
from preamp.planning.planner import POLICIES, policies_of, why_not_called
from preamp.planning.report import advice_lines, misfit_lines, table_of, write
from preamp.policy import Policy
from preamp.policy.storage import Storage

_MODULE = "preamp_planned_script"
T = TypeVar("T")


def plan(
    script: Annotated[Path, typer.Argument(help="Python file that makes the model.")],
    names: Annotated[
        str, typer.Option(help="A function that makes all, or model,loss_fn,batch[,optimizer].")
    ] = "make",
    levels: Annotated[str | None, typer.Option(help="Opt levels to look at.")] = None,
    storage: StorageName = "full",
    place: PlaceName = "device",
    releases: Releases = False,
    steps: Annotated[int, typer.Option(help="Float32 steps to watch.")] = 4,
    verify: Annotated[
        int,
        typer.Option(
            "--verify", "--verify-steps", help="Steps to train each level with; 0 for none."
        ),
    ] = 8,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML page with the losses.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recommend an opt level and a loss scale, by watching float32 steps and trying.

    The script is run; it defines make() -> (model, loss_fn, batch) or (model, loss_fn, batch,
    optimizer), where loss_fn(model, batch) returns a scalar loss.
    """
    try:
        with only_answer_on_stdout(is_wanted=as_json):
            kept = storage_of(storage, place, releases)
            wanted = policies_of(None if levels is None else _levels(levels), kept)
            parts = _parts(script, names)  # last, since a script may take its time
            report = preamp.plan(*parts, levels=wanted, steps=steps, verify_steps=verify)
    except (ValueError, TypeError, PreampError) as error:
        if _is_of_script(error):  # its traceback tells more
            begin_tracebacks(is_foreign)
            raise
        refuse(error)
    except Exception:
        begin_tracebacks(is_foreign)
        raise
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        console = make_console()
        print_wrapped(console, [*advice_lines(report), *_kept_lines(wanted, kept), ""])
        headings, *rows = table_of(report)
        print_table(console, headings, rows, left=len(headings))
        print_wrapped(console, misfit_lines(report)[1:])
    if output is not None:  # last, so that the answer is there whatever happens to the page
        with refusing():
            write(report, output)


def _kept_lines(policies: Mapping[str, Policy], storage: Storage) -> list[str]:
    """Where gradients are kept that were to be released; empty where that is nowhere."""
    keeping = keeping_gradients(policies, storage)
    text = f"- At {' and '.join(keeping)} gradients are not released. {NEEDS_ALL_GRADIENTS}"
    return [text] if keeping else []


def _is_of_script(error: BaseException) -> bool:
    """Whether a bug of the script, or preamp where the script called it, raised the error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = str(frames[-1].f_globals.get("__name__"))
    return any(map(is_foreign, frames)) or not last.startswith("preamp.")


def _levels(text: str) -> list[str]:
    """Split at commas and spaces, except where a name has spaces itself."""
    parts = [part.strip() for part in text.strip(", ").split(",")]
    return [name for part in parts for name in ([part] if part in POLICIES else part.split())]


def _parts(script: Path, names: str) -> Sequence[Any]:
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
    """Run a script under a name of its own, so that its ``__main__`` part stays out.

    ``import apex`` means preamp from here on, as under ``preamp run``.
    """
    if not script.is_file():
        raise bad_value(
            f"There is no file {str(script)!r}", "It runs one Python file", "Check the path"
        )
    with contextlib.suppress(PreampStateError):  # an installed Apex serves the script itself
        preamp.install_apex_alias()
    sys.path.insert(0, str(script.resolve().parent))
    path = os.path.abspath(script)
    program, loader = read_script(path), SourceFileLoader(_MODULE, path)
    # With its spec, as an import would: inspect and importlib ask for it.
    spec = cast("ModuleSpec", spec_from_file_location(_MODULE, path, loader=loader))
    module = module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses look their module up
    arguments, sys.argv = sys.argv, [str(script)]  # this command's own are not for it
    try:
        _without_exit(lambda: exec(program.code, vars(module)), script)
    finally:
        sys.argv = arguments
    return module


def _attribute(module: ModuleType, script: Path, name: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    raise bad_value(
        f"{script} defines no {name!r}",
        "It defines make(), or what --names says",
        "Add def make(): return model, loss_fn, batch, optimizer",
    )
