# SPDX-License-Identifier: BSD-3-Clause
"""Where an engine stands within a step, as plain data: to stop anywhere and go on bitwise.

Between two steps nearly all of it is empty. After a ``scale_loss`` block it is what the block has
found and what unscales its gradients. The gradients themselves are the caller's to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from preamp.core.away import made_away
from preamp.core.late_numbers import LateNumber, read_numbers
from preamp.engine.engine import Engine
from preamp.engine.overflow import GradientNote
from preamp.engine.session import Delayed, OptimizerSession, Stage
from preamp.engine.state import late_scalers
from preamp.optim import Record, RowMemo, Twin, leaf_of, pair_of

Apply = Callable[[], None]


def engine_state(engine: Engine) -> dict[str, Any]:
    """Return the loss scales and counters of ``Engine.state_dict``, and what is pending.

    That is everything but weights, gradients and optimizers' state. Waits for steps whose outcome
    is not known yet, and once for all numbers. Raises `PreampStateError` if a gradient was changed
    while a loss scale was on it.
    """
    engine.ledger.settle(wait=True)
    state = read_numbers({"scalers": late_scalers(engine), "pending": _pending(engine)})
    for session in state["pending"]["sessions"]:
        if not session["found_inf"]:  # nothing overflowed, so there is nothing to tell
            session["notes"] = []
    return state


def _pending(engine: Engine) -> dict[str, Any]:
    sessions = list(engine.sessions.values())
    return {
        "last_skipped": engine.ledger.last_skipped,
        "scalers": [
            {
                "found_inf": LateNumber(float, scaler.found_inf),
                "late": engine.adjustments.state_of(scaler, sessions),
            }
            for scaler in engine.scalers
        ],
        "sessions": [_session_state(engine, session) for session in sessions],
    }


def _session_state(engine: Engine, session: OptimizerSession) -> dict[str, Any]:
    params = list(session.params())
    twins = _twins(params)
    memos = {index: twin.memo() for index, twin in twins.items()}
    norm, clips, clipped = session.known_norm.memo(session.marks())
    table: dict[int, int] = {}  # of factors, by id
    values: list[LateNumber] = []
    for memo in memos.values():
        for factor in () if memo.record is None else (memo.record.factor, memo.record.unclipped):
            if factor is not None and id(factor) not in table:
                table[id(factor)] = len(values)
                values.append(LateNumber(float, factor))
    untouched, aside = session.direct.memo(params)
    flag, heard = map(_late, (session.found_inf, session.heard))
    places = {id(param): index for index, param in enumerate(_all_of_model(engine))}
    return {
        "stage": session.stage.value,
        "found_inf": flag,
        "heard": heard,
        "may_be_local": session.may_be_local,
        "delayed": None if session.delayed is None else _delayed_state(engine, session.delayed),
        "norm": {"value": norm, "clips": clips, "clipped": clipped},
        "untouched": untouched,
        "aside": aside,
        "factors": values,
        "twins": {index: _memo_state(memo, table) for index, memo in memos.items()},
        "notes": [_note_state(note, places) for note in session.notes] if flag else [],
    }


def _late(value: torch.Tensor | None) -> LateNumber | None:
    return None if value is None else LateNumber(float, value)


def _twins(params: Sequence[torch.Tensor]) -> dict[int, Twin]:
    pairs = enumerate(map(pair_of, params))
    return {index: twin for index, twin in pairs if twin is not None}


def _all_of_model(engine: Engine) -> list[torch.Tensor]:
    """The models' parameters behind everything that the engine's optimizers update."""
    updated = (p for session in engine.sessions.values() for p in session.params())
    return [leaf_of(param) for param in updated]


_ROW = ("is_raw", "is_open", "is_carried", "zeros_aside")
_RECORD = ("is_plain", "is_alone", "is_spent", "is_zeroed", "is_shown")


def _memo_state(memo: RowMemo, table: Mapping[int, int]) -> dict[str, Any]:
    state, seen = {name: getattr(memo, name) for name in _ROW}, memo.record
    if seen is None:
        return {**state, "seen": None}
    both = (seen.factor, seen.unclipped)
    factor, unclipped = (None if by is None else table[id(by)] for by in both)
    flags = {name: getattr(seen, name) for name in _RECORD}
    return {**state, "seen": {"factor": factor, **flags, "unclipped": unclipped}}


def _delayed_state(engine: Engine, delayed: Delayed) -> dict[str, Any]:
    return {
        "loss_id": engine.scalers.index(delayed.scaler),
        "is_current": delayed.continues_with(delayed.scaler),
        "inverse": _late(delayed.inverse),
        "has_gradients": delayed.has_gradients,
        "note": _note_state(delayed.note, {}),
    }


def _note_state(note: GradientNote, places: Mapping[int, int]) -> dict[str, Any]:
    found = [
        ([places[id(p)] for p in params], largest, finite)
        for params, largest, finite in note.found
        if all(id(param) in places for param in params)
    ]
    return {
        "loss_id": note.loss_id,
        "loss_finite": LateNumber(bool, note.loss_finite),
        "scale": LateNumber(float, note.scale),
        "found": found,
    }


def is_idle(state: Mapping[str, Any]) -> bool:
    """Whether what was pending in an `engine_state` was between two steps, with nothing to keep."""
    return all(
        entry["stage"] == Stage.READY.value and entry["found_inf"] is None
        for entry in state["sessions"]
    )


def drop_pending(engine: Engine) -> None:
    """Be between two steps: without gradients, and without anything known of earlier ones."""
    for session in engine.sessions.values():
        session.drop_gradients()
        for param in session.direct_params():
            param.grad = None


# -- and back ------------------------------------------------------------------------------------


def prepare_pending(engine: Engine, state: Mapping[str, Any]) -> Apply:
    """Read what was pending in an `engine_state`, and return what applies it.

    Nothing changes before. Gradients must be as they were when that is called. Raises ``KeyError``,
    ``TypeError``, ``ValueError`` or ``IndexError`` if ``state`` does not fit the engine.
    """
    sessions = list(engine.sessions.values())
    scalers = [
        (
            _flag(entry["found_inf"], scaler.device),
            engine.adjustments.prepared(scaler, sessions, entry["late"]),
        )
        for scaler, entry in zip(engine.scalers, state["scalers"], strict=True)
    ]
    applies = [
        _prepare_session(engine, session, entry)
        for session, entry in zip(sessions, state["sessions"], strict=True)
    ]
    last_skipped = bool(state["last_skipped"])

    def apply() -> None:
        for scaler, (found_inf, apply_late) in zip(engine.scalers, scalers, strict=True):
            scaler.record(found_inf, forgets=True)
            apply_late()
        for apply_one in applies:
            apply_one()
        engine.ledger.last_skipped = last_skipped

    return apply


def _prepare_session(engine: Engine, session: OptimizerSession, state: Mapping[str, Any]) -> Apply:
    params = list(session.params())
    twins = _twins(params)
    if twins.keys() != state["twins"].keys():
        raise ValueError("other parameters have masters")
    stage = Stage(state["stage"])
    found_inf, heard = (
        None if flag is None else _flag(flag, engine.device)
        for flag in (state["found_inf"], state["heard"])
    )
    aside = cast("list[tuple[int, torch.Tensor, bool]]", state["aside"])
    waits = engine.policy.storage.waits_on_host
    aside = [(int(i), _placed(g, params[i], waits=waits), bool(carried)) for i, g, carried in aside]
    untouched = [int(index) for index in state["untouched"]]
    if any(index not in range(len(params)) for index in untouched):
        raise IndexError("there are fewer parameters")
    norm, own = state["norm"], _all_of_model(engine)
    known = None if norm["value"] is None else norm["value"].to(engine.device)
    known_norm = (known, bool(norm["clips"]), bool(norm["clipped"]))
    may_be_local = bool(state["may_be_local"])
    notes = [_note(engine, note, own) for note in state["notes"]]
    left: Any = state["delayed"]
    delayed = None if left is None else _delayed(engine, left)
    is_current = left is not None and bool(left["is_current"])
    factors = _Factors(state["factors"])
    memos = {index: _memo(state["twins"][index], factors, twin) for index, twin in twins.items()}

    def apply() -> None:
        # A static scale is what initialize says now; gradients of another one are not added to.
        if delayed and is_current and delayed.scaler.value() == float(delayed.note.scale):
            delayed.generation = delayed.scaler.generation
        if stage is not Stage.READY:
            engine.has_scaled = True
        session.resume(stage, delayed, may_be_local=may_be_local)
        session.found_inf, session.heard, session.notes = found_inf, heard, notes
        session.direct.recall(params, (untouched, aside))
        for index, twin in twins.items():
            twin.recall(memos[index])
        session.known_norm.recall(known_norm, session.marks())

    return apply


def _placed(grad: torch.Tensor, param: torch.Tensor, *, waits: bool) -> torch.Tensor:
    """A gradient where that of ``param`` lies; its values stay on the host if they wait there."""
    return made_away(grad, param.device) if waits and param.is_cuda else grad.to(param.device)


def _flag(value: Any, device: torch.device) -> torch.Tensor:
    """A flag of overflow, of several ranks their sum."""
    number = float(value)
    if not 0 <= number < 2**31:
        raise ValueError(f"{number} is no flag of overflow")
    return torch.tensor(number, dtype=torch.float32, device=device)


class _Factors:
    """What unscales gradients: one tensor for each value and device, as after a block."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values
        self._made: dict[tuple[int, torch.device], torch.Tensor] = {}

    def on(self, index: int, device: torch.device) -> torch.Tensor:
        key = (index, device)
        if key not in self._made:
            self._made[key] = _scalar(self._values[index], device)
        return self._made[key]


def _scalar(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float32, device=device)


def _memo(state: Mapping[str, Any], factors: _Factors, twin: Twin) -> RowMemo:
    given, is_raw = state["seen"], state["is_raw"]
    is_raw = None if is_raw is None else bool(is_raw)
    where = [bool(state[name]) for name in _ROW[1:]]
    if given is None:
        return RowMemo(None, is_raw, *where)
    both = (given["factor"], given["unclipped"])
    factor, unclipped = (None if i is None else factors.on(i, twin.half.device) for i in both)
    flags = [bool(given[name]) for name in _RECORD]
    record = Record(factor, *flags, unclipped=unclipped)
    return RowMemo(record, is_raw, *where)


def _delayed(engine: Engine, state: Mapping[str, Any]) -> Delayed:
    scaler = engine.scaler(int(state["loss_id"]))
    note = _note(engine, state["note"], ())
    inverse = None if state["inverse"] is None else _scalar(state["inverse"], engine.device)
    return Delayed(scaler, -1, inverse, note, bool(state["has_gradients"]))


def _note(engine: Engine, state: Mapping[str, Any], params: Sequence[torch.Tensor]) -> GradientNote:
    note = GradientNote(
        loss_id=int(state["loss_id"]),
        loss_finite=torch.tensor(bool(state["loss_finite"])),
        scale=_scalar(state["scale"], engine.device),
    )
    found: Any = state["found"]
    for places, largest, finite in found:
        note.found.append(([params[int(place)] for place in places], largest, finite))
    return note
