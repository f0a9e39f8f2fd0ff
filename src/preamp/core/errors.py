# SPDX-License-Identifier: BSD-3-Clause
"""Errors that a user can cause, and the one form in which they are worded.

Every message has three parts: what was got, what is allowed, what to do. Bad values raise
``ValueError`` and bad types ``TypeError``; the classes here are for what the builtins do not say.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar


class PreampError(RuntimeError):
    """Base class of preamp's own errors; a ``RuntimeError``, as scripts written for Apex expect."""


class PreampStateError(PreampError):
    """A call came in an order, or for an object, that cannot work."""


class PreampPolicyError(PreampError):
    """An opt level is unknown, or an override contradicts it."""


class PreampUnavailableError(PreampError):
    """What was asked for by name needs hardware or a package that is not here."""


class CheckpointError(PreampError):
    """A file is damaged, incomplete, foreign, or of a newer version; nothing was loaded."""


class LossScaleError(PreampError):
    """Dynamic loss scaling cannot go on.

    The scale fell to its minimum, or too many steps in a row were skipped.
    """


_LONGEST = 4000  # characters of what was got


def message(got: str, allowed: str, do: str) -> str:
    """Join what was got, what is allowed and what to do into an error message of sentences.

    What was got may come from a file, and be of any length: the middle of it is left out.
    """
    if len(got) > _LONGEST:
        got = f"{got[: _LONGEST // 2]} … {got[-_LONGEST // 2 :]}"
    return " ".join(f"{part.strip().rstrip('.')}." for part in (got, allowed, do))


def with_article(noun: str) -> str:
    """Put ``"a"`` or ``"an"`` before a name, as it is spoken: an AdamW, an SGD, a UserList."""
    spelled = noun[:2].isupper() and noun[:2] != "LA"  # LARC and LAMB are words
    vowels = "AEFHILMNORSX" if spelled else "AEIOaeio"
    sounds_open = noun[:1] in vowels or (noun[:2].lower() in ("un", "up") and noun[2:3] != "i")
    return f"{'an' if sounds_open else 'a'} {noun}"


def system_error(error: OSError, got: str, allowed: str, do: str) -> OSError:
    """Return an error of the same class in three parts; the system's reason is added to ``got``."""
    reason = error.strerror or str(error) or type(error).__name__
    made = type(error)(message(f"{got}: {reason}", allowed, do))
    made.errno = error.errno  # with more of these, the text would be another
    return made


E = TypeVar("E", bound=Exception)


def worded(kind: type[E], got: str, allowed: str, do: str) -> E:
    """An error of any class; see `message`."""
    return kind(message(got, allowed, do))


bad_value = partial(worded, ValueError)  # a wrong value
bad_type = partial(worded, TypeError)  # a wrong type
bad_state = partial(worded, PreampStateError)  # a call in the wrong order
unavailable = partial(worded, PreampUnavailableError)  # missing hardware, or a missing package
