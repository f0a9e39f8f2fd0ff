# SPDX-License-Identifier: BSD-3-Clause
"""Float32 values in fewer bits: what each format means, in plain torch operations.

**Split masters.** A float32 value is a half weight, rounded to nearest with ties away from zero,
and an int16 that says how far it is from there, in 2**-16 of a unit in the last place. For bfloat16
weights these are the low 16 bits of the word, and every word comes back, nan apart. For float16
weights every value comes back in float16's normal range, and to 2**-41 below; what float16 cannot
hold is infinite. Zero with an int16 that no zero has is zero: a script wrote it.

**Moments.** Stored values are rounded up or down by chance, so that what is stored is right on
average: an average that moves by less than a unit in each step would stand still otherwise. Chance
is a number of 16 bits for each element, `noise`, which depends on the seed, the tensor, the step
and the element's index in the whole tensor alone; another list of state takes it times `ODD`.
bfloat16 takes the nearest two values.

8-bit formats have a float32 scale, a power of two, for each block: `BLOCK` consecutive elements of
one row (one index of the first dimension), the last of a row with what is left. Ranks that have
whole rows, as ``fully_shard`` gives them, have whole blocks. Codes are small floats below the
scale, of 5 bits of mantissa and the rest of exponent, with gradual underflow: `SIGNED` has 4
binades and a sign, `UNSIGNED` 8, and nothing above zero becomes zero there, since updates are
divided by it. They take shifts and sums, where roots take a division and two roots of each element,
and the same bits on every device for granted.

docs/storage.md says how near they come to float32 moments, and why no other map was taken.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox 4x32-10;
Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from preamp.core.dtypes import HALF_DTYPES

BLOCK = 128
"""Elements of a block."""


class Format(Enum):
    """How the tensors of one list of an optimizer's state are kept."""

    PLAIN = "plain"  # as they are, rounded to nearest even
    BFLOAT16 = "bfloat16"  # rounded by chance
    SIGNED = "signed"  # int8 and scales
    UNSIGNED = "unsigned"  # uint8 and scales

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the tensors, if the format says so."""
        return _DTYPES.get(self)

    @property
    def has_scales(self) -> bool:
        """Whether there is a scale for each block."""
        return self in (Format.SIGNED, Format.UNSIGNED)


_DTYPES = {Format.BFLOAT16: torch.bfloat16, Format.SIGNED: torch.int8, Format.UNSIGNED: torch.uint8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What an update is told of lists that are not kept as plain tensors."""

    # Of each parameter, which is a half tensor then, the int16 tensor beside it; of its shape
    lows: Sequence[torch.Tensor] | None = None
    # Of each list of the rule's state, in order; none means that all are plain
    formats: tuple[Format, ...] = ()
    # Of each list of state: float32 tensors of `scales_shape`, or ``None`` without scales
    scales: tuple[Sequence[torch.Tensor] | None, ...] = ()
    seed: int = 0  # below 2**32
    # Of each parameter: a number that tells it from the others, below 2**32
    numbers: Sequence[int] = ()
    # Of each parameter: which element of the whole tensor its first one is
    starts: Sequence[int] = ()

    def at(self, places: Sequence[int]) -> Stored:
        """What is told of the parameters at ``places`` alone."""
        return replace(
            self,
            lows=None if self.lows is None else [self.lows[place] for place in places],
            scales=tuple(
                [None if row is None else [row[place] for place in places] for row in self.scales]
            ),
            numbers=[self.numbers[place] for place in places] if self.numbers else (),
            starts=[self.starts[place] for place in places] if self.starts else (),
        )


# -- half weights beside masters ------------------------------------------------------------------


def lead(param: torch.dtype, half: torch.dtype) -> bool:
    """Whether a tensor beside a parameter of this dtype is a half weight that it refines."""
    return half in HALF_DTYPES and param not in HALF_DTYPES


def taken_over(master: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """Return the values of a pair: the half weight is the truth, and the master refines it.

    That is the master's value where it rounds to the half weight, to nearest even, bit for bit;
    what the half weight says where it does not. A master beyond float16 rounds to infinity, and
    stays where the half weight is that.
    """
    return torch.where(torch.eq(*bits_of(master, half)), master, half.to(master.dtype))


def bits_of(master: torch.Tensor, half: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of what a master rounds to, and of its half weight."""
    return master.to(half.dtype).view(torch.int16), half.view(torch.int16)


# -- split masters --------------------------------------------------------------------------------


def split(wide: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 values as half weights of ``dtype`` and int16 beside them."""
    return _split_bfloat16(wide) if dtype is torch.bfloat16 else _split_float16(wide)


def join(half: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the float32 values that `split` has made these of."""
    low = torch.where((half == 0) & (low < 0), torch.zeros_like(low), low)
    if half.dtype is torch.bfloat16:
        high = half.view(torch.int16).int() << 16
        word = (high - ((low.int() & 0x8000) << 1)) | (low.int() & 0xFFFF)
        return torch.where(half.isnan(), half.float(), word.view(torch.float32))
    wide = half.float()
    far = low.float() * 2.0**-16 * _unit_of(wide)
    return torch.where(wide.isfinite(), torch.copysign(wide.abs() + far, wide), wide)


BEYOND_FLOAT16 = 65520.0
"""From here on float16 rounds to infinity."""


def are_beyond_float16(wides: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each has a finite value that is infinite in float16, and so lost when split.

    Synchronises once.
    """
    found = [((w.abs() >= BEYOND_FLOAT16) & w.isfinite()).any() for w in wides]
    together: Any = torch.stack([flag.to(found[0].device) for flag in found]) if found else None
    return together.tolist() if found else []


def _split_bfloat16(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    word = wide.view(torch.int32)
    # Sums of int32 wrap around, and only those of nan do.
    high = ((word + 0x8000) >> 16).to(torch.int16)
    is_nan = wide.isnan()
    half = torch.where(is_nan, torch.full_like(high, 0x7FC0), high).view(torch.bfloat16)
    return half, torch.where(is_nan, torch.zeros_like(high), word.to(torch.int16))


def _split_float16(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = wide.half()
    far = _distance(wide, half).round()
    # Half way, as far as 16 bits tell, and rounded towards zero, to the even one: one further
    bits = half.view(torch.int16) + (far == 0x8000).to(torch.int16)
    half = bits.view(torch.float16)
    far = torch.where(half.isfinite(), _distance(wide, half), torch.zeros_like(far))
    return half, far.round().to(torch.int16)


def _distance(wide: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """How much larger magnitudes are than the half ones, in 2**-16 of a unit of these."""
    rounded = half.float()
    return (wide.abs() - rounded.abs()) * (2.0**16 / _unit_of(rounded))


def _unit_of(rounded: torch.Tensor) -> torch.Tensor:
    """The unit in the last place of float16 values, which come as float32."""
    exponent = (rounded.view(torch.int32) >> 23) & 0xFF
    field = (exponent.clamp(min=113, max=142) - 10) << 23
    return field.int().view(torch.float32)


# -- chance ---------------------------------------------------------------------------------------

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ODD = 0x9E37
"""What the chance of the second list of state is multiplied by, modulo 2**16: near the golden
section, so that both together cover pairs evenly. Chance of its own would take as long again."""
_WORD = 0xFFFFFFFF


def noise(
    count: int,
    *,
    start: int,
    step: int | torch.Tensor,
    row: int,
    seed: int,
    number: int,
    device: torch.device,
) -> torch.Tensor:
    """Return the 16 bits of chance of each of ``count`` elements from ``start`` on, int32.

    Philox 4x32-10 of the counter ``(index // 8, high word of that, step, 0)`` and the key
    ``(seed, number)``: four words make eight numbers, of each word the low half first. Times
    ``ODD ** row``, where ``row`` is which list of the state it is.
    """  # fmt: skip
    first, last = start // 8, (start + count + 7) // 8
    counter = torch.arange(first, last, dtype=torch.int64, device=device)
    zero = torch.zeros_like(counter)
    words = philox([counter & _WORD, counter >> 32, (zero + step) & _WORD, zero], (seed, number))
    halves = [part for word in words for part in (word & 0xFFFF, word >> 16)]
    found = torch.stack(halves, 1).reshape(-1).int()
    return (found[start - 8 * first :][:count] * (ODD**row & 0xFFFF)) & 0xFFFF


def philox(words: list[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Philox 4x32-10 of counters of four words; all are int64 with 32 bits in use."""
    for _ in range(10):
        high, low = zip(
            *[_product(by, word) for by, word in zip(MULTIPLIERS, words[::2], strict=True)],
            strict=True,
        )
        words = [high[1] ^ words[1] ^ key[0], low[1], high[0] ^ words[3] ^ key[1], low[0]]
        key = (key[0] + WEYL[0]) & _WORD, (key[1] + WEYL[1]) & _WORD
    return words


def _product(by: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of a product; int64 has no room for the product itself."""
    low, high = by * (word & 0xFFFF), by * (word >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def round_by_chance(wide: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """Return float32 values as bfloat16, away from zero if the `noise` says so; nan is kept."""
    word = (wide.view(torch.int32) + chance) >> 16
    rounded = word.to(torch.int16).view(torch.bfloat16)
    return torch.where(wide.isfinite(), rounded, wide.bfloat16())


# -- blocks of 8 bits -----------------------------------------------------------------------------

MANTISSA = 5  # bits of a code
BINADES = {Format.SIGNED: 4, Format.UNSIGNED: 8}
"""Of the codes of a block; the lowest two have the same distances."""
LEAST = 12
"""Least exponent field of a scale: all that codes stand for is in float32's normal range."""
_DROPPED = 23 - MANTISSA


def blocks_of(shape: torch.Size | Sequence[int]) -> tuple[int, int, int]:
    """Rows of a tensor, blocks of a row, and elements of a block; the last may have fewer."""
    rows = shape[0]
    row = 1
    for size in shape[1:]:
        row *= size
    return rows, -(-row // BLOCK), min(row, BLOCK)


def can_be_blocks(shape: torch.Size | Sequence[int]) -> bool:
    """Whether a tensor of this shape, the whole one, may be kept in 8 bits.

    Vectors, small tensors, and those whose rows are short stay as they are: scales would take as
    much as is saved, and they are few bytes.
    """
    size = 1
    for length in shape:
        size *= length
    return len(shape) > 1 and size >= 4096 and size // shape[0] >= 16


def scales_shape(shape: torch.Size | Sequence[int]) -> tuple[int, int]:
    """Of the scales of a tensor that is kept in 8 bits."""
    return blocks_of(shape)[:2]


def are_scales(values: torch.Tensor) -> bool:
    """Whether `encode` may have made these: powers of two, zeros, or not finite. Synchronises."""
    is_power = values.view(torch.int32) & ~(0xFF << 23) == 0
    return bool((is_power | ~values.isfinite()).all())


def encode(
    wide: torch.Tensor, kind: Format, chance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 values as codes and the scales of their blocks.

    ``chance`` is `noise`, one number for each element in the order of indices. A block with a value
    that is not finite has that for a scale, and comes back as nan. In the last 32nd of float32's
    range codes saturate.
    """
    room, chances = _in_blocks(wide), _in_blocks(chance.view(wide.shape))
    size = room.abs()
    word = size.view(torch.int32)
    largest = word.amax(2, keepdim=True)  # nan is above all
    is_finite = largest < 0x7F800000
    # Of the largest magnitude, or the next one where that lies above all codes
    field = (largest.clamp(max=0x7F7FFFFF) + (1 << _DROPPED) - 1) >> 23
    field = field.clamp(min=LEAST, max=254)
    lowest = field - (BINADES[kind] - 2)
    # Below the lowest binade with one bit more, so that steps are as long as there
    below = (size + _power(lowest)).view(torch.int32) - (1 << 23)
    word = torch.where(word < lowest << 23, below, word)
    code = ((word + (chances << (_DROPPED - 16))) >> _DROPPED) - ((lowest - 1) << MANTISSA)
    code = code.clamp(max=(BINADES[kind] << MANTISSA) - 1)
    if kind is Format.UNSIGNED:
        code = torch.where((code == 0) & (size > 0), torch.ones_like(code), code)
    code = torch.where(is_finite, torch.where(room < 0, -code, code), torch.zeros_like(code))
    codes = code.flatten(1)[:, : wide.numel() // max(wide.shape[0], 1)].reshape(wide.shape)
    scales = torch.where(is_finite, _power(field), largest.view(torch.float32))
    return codes.to(_DTYPES[kind]), scales.squeeze(2)


def decode(codes: torch.Tensor, scales: torch.Tensor, kind: Format) -> torch.Tensor:
    """Return what `encode` has kept, float32."""
    room = _in_blocks(codes).int()
    by = scales.unsqueeze(2)
    lowest = (by.view(torch.int32) >> 23).clamp(min=LEAST) - (BINADES[kind] - 2)
    code = room.abs()
    is_below = code < 1 << MANTISSA
    above = (code + ((lowest - 1) << MANTISSA)) << _DROPPED
    value = torch.where(is_below, above + (1 << 23), above).view(torch.float32)
    value = torch.where(is_below, value - _power(lowest), value)
    value = torch.where(by.isfinite(), torch.where(room < 0, -value, value), torch.nan)
    return value.flatten(1)[:, : codes.numel() // max(codes.shape[0], 1)].reshape(codes.shape)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Rows, blocks, and the elements of each, with zeros behind the last of a row."""
    rows, blocks, length = blocks_of(values.shape)
    flat = values.reshape(rows, values.numel() // max(rows, 1))
    if rows:
        flat = torch.nn.functional.pad(flat, (0, blocks * length - flat.shape[1]))
    return flat.reshape(rows, blocks, length)


def _power(field: torch.Tensor) -> torch.Tensor:
    """The power of two with this exponent field."""
    return (field.int() << 23).view(torch.float32)
