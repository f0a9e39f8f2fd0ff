# SPDX-License-Identifier: BSD-3-Clause
"""``preamp plan``: a script's model, watched and tried, and the level to take."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

import preamp
from preamp.core.errors import PreampError, message
from preamp.planning.cases import CASES, case_named

_MODULE = "preamp_planned_script"


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
        parts = _parts(script, names, case)
        wanted = None if levels is None else re.split(r"[,\s]+", levels.strip(", "))
        report = preamp.plan(*parts, levels=wanted, steps=steps, verify_steps=verify_steps)
    except (ValueError, TypeError, PreampError) as error:
        if not _is_ours(error):  # a bug in the script: its traceback tells more
            raise
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        typer.echo(str(report))


def _parts(script: Path | None, names: str, case: str | None) -> Sequence[Any]:
    if (script is None) == (case is None):
        raise ValueError(
            message(
                "Got both a script and --case" if case else "Got neither a script nor --case",
                "One of them says what is planned",
                "Call preamp plan script.py, or preamp plan --case stable",
            )
        )
    if script is None:
        return case_named(case or "").make()
    module = _run(script)
    given = [_attribute(module, script, name) for name in names.split(",")]
    found: Any = given[0]() if len(given) == 1 else given
    if isinstance(found, (list, tuple)) and len(found) in (3, 4):  # pyright: ignore[reportUnknownArgumentType]
        return found  # pyright: ignore[reportUnknownVariableType]
    raise ValueError(
        message(
            f"{script} gave something else than three or four objects",
            "Needed are model, loss_fn, batch, and if there is one the optimizer",
            "Return them from make(), or name them by --names model,loss_fn,batch",
        )
    )


def _run(script: Path) -> ModuleType:
    """Run a script under a name of its own, so that its ``__main__`` part stays out."""
    if not script.is_file():
        raise ValueError(
            message(
                f"There is no file {str(script)!r}", "It runs one Python file", "Check the path"
            )
        )
    spec = importlib.util.spec_from_file_location(_MODULE, script)
    if spec is None or spec.loader is None:
        raise ValueError(
            message(f"{str(script)!r} is no Python file", "Its name ends in .py", "Rename it")
        )
    sys.path.insert(0, str(script.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
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
    raise ValueError(
        message(
            f"{script} defines no {name!r}",
            "It defines make(), or what --names says",
            "Add def make(): return model, loss_fn, batch, optimizer",
        )
    )
