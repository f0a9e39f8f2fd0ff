# SPDX-License-Identifier: BSD-3-Clause
"""Half products on CPUs that cannot multiply half matrices: through float32 and back.

Contract of a wide product: the inputs are half values (float32 inputs are rounded first), the
product is computed and accumulated in float32, and the result is rounded once. Gradients follow
from the differentiable casts: the incoming half gradient is widened, the products of the backward
pass run in float32, and each result is rounded once. That is what a matrix unit for half values
does. Without one, torch multiplies them on the CPU many times slower than float32. Float16
convolutions run wide on every CPU: torch's backward of them does not use such units, and takes
about fifty times as long as float32's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch

from preamp.core.pytree import map_tensors
from preamp.core.tensors import is_sharded

AnyFunction = Callable[..., Any]

_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"
_PRODUCTS = "matmul mm mv bmm addmm addmv addbmm baddbmm"
_BY_NAMESPACE = {
    "torch": f"{_CONVOLUTIONS} {_PRODUCTS} einsum chain_matmul tensordot bilinear",
    "torch.nn.functional": f"{_CONVOLUTIONS} linear scaled_dot_product_attention bilinear",
    "torch.Tensor": f"{_PRODUCTS} __matmul__ __rmatmul__",
    "torch.linalg": "matmul multi_dot",
    "recurrent layers": "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
}

WIDE_FUNCTIONS: Final = tuple(
    (namespace, name) for namespace, names in _BY_NAMESPACE.items() for name in names.split()
)
"""``(namespace, name)`` of the functions worth running wide; namespaces as in the op table."""

WIDE_CONVOLUTIONS: Final = tuple(pair for pair in WIDE_FUNCTIONS if pair[1].startswith("conv"))
"""Those of them that are convolutions."""

# CPU autocast leaves these as they are, so that its being on does not make a call of them half.
# At O1 the op table casts their arguments before they come here.
_NOT_CAST: Final = frozenset(
    "mv addmv bilinear lstm gru rnn_tanh rnn_relu lstm_cell gru_cell".split()
)

# How to ask torch's oneDNN for units, and the x86 processors without
_UNITS: Final = {
    torch.float16: ("_is_mkldnn_fp16_supported", ("DEFAULT", "AVX2", "AVX512")),
    torch.bfloat16: ("_is_mkldnn_bf16_supported", ("DEFAULT", "AVX2")),
}


@functools.cache
def cpu_lacks_matmul(half: torch.dtype) -> bool:
    """Whether this CPU has no units that multiply matrices of the dtype ``half``.

    Where torch's oneDNN cannot be asked (other builds), x86 is taken to lack those for float16, and
    before AVX-512 those for bfloat16; anything else is taken to have them.
    """
    name, x86_without = _UNITS[half]
    supported = getattr(torch.ops.mkldnn, name, None)
    if supported is None:
        return torch.backends.cpu.get_cpu_capability() in x86_without
    return not supported()


def leaves(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among ``values`` and in nested lists and tuples; ``torch.compile`` traces it."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(leaves(cast("Sequence[Any]", value)))
    return found


def _has_own_products(tensor: torch.Tensor) -> bool:
    """Whether it wraps others and says what products are, as torchao's; a ``DTensor`` asks us."""
    return hasattr(type(tensor), "__tensor_flatten__") and not is_sharded(tensor)


def _runs_in(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], half: torch.dtype) -> bool:
    """Whether torch would compute this call in the dtype ``half`` on the CPU."""
    tensors = leaves((*args, *kwargs.values()))
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    if not dtypes or any(t.device.type != "cpu" for t in tensors):
        return False
    if kwargs.get("out") is not None:
        return False
    if torch.is_autocast_enabled("cpu") and name not in _NOT_CAST:
        # Autocast casts the other half dtype too; float64 it leaves alone.
        is_half = torch.get_autocast_dtype("cpu") is half and torch.float64 not in dtypes
    else:
        is_half = dtypes == {half}
    return is_half and not any(map(_has_own_products, tensors))


class _Thread(threading.local):
    is_native = False


_THREAD = _Thread()


@contextmanager
def native_products() -> Generator[None]:
    """Let this thread's products be torch's own, however slow; what is seen is as on a GPU."""
    before, _THREAD.is_native = _THREAD.is_native, True
    try:
        yield
    finally:
        _THREAD.is_native = before


def wide(half: torch.dtype) -> Callable[[AnyFunction], AnyFunction]:
    """Make a wrapper of products: what torch would compute in ``half`` on the CPU runs wide."""

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(half).float()

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(half) if tensor.dtype is torch.float32 else tensor

    def wrap(fn: AnyFunction) -> AnyFunction:
        @functools.wraps(fn)
        def run_wide(*args: Any, **kwargs: Any) -> Any:
            if _THREAD.is_native or not _runs_in(fn.__name__, args, kwargs, half):
                return fn(*args, **kwargs)
            wide_args = [map_tensors(widen, arg) for arg in args]
            wide_kwargs = {name: map_tensors(widen, arg) for name, arg in kwargs.items()}
            with torch.autocast("cpu", enabled=False):
                result = fn(*wide_args, **wide_kwargs)
            return map_tensors(narrow, result)

        return run_wide

    return wrap
