# SPDX-License-Identifier: BSD-3-Clause
"""float16 products on CPUs that cannot multiply float16: through float32 and back.

Contract of a wide product: the inputs are float16 values (float32 inputs are rounded to float16
first), the product is computed and accumulated in float32, and the result is rounded to float16
once. Gradients follow from the differentiable casts: the incoming float16 gradient is widened, the
products of the backward pass run in float32, and each result is rounded to float16 once. That is
what a float16 matrix unit does. Without one, torch multiplies float16 on the CPU many times slower
than float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch

from preamp.core.pytree import map_tensors

AnyFunction = Callable[..., Any]

WIDE_FUNCTIONS: Final[tuple[tuple[str, str], ...]] = (
    *(("torch.nn.functional", name) for name in ("linear", "scaled_dot_product_attention")),
    *(
        (namespace, name)
        for namespace in ("torch", "torch.nn.functional")
        for name in (
            "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"
        ).split()
    ),
    *(
        (namespace, name)
        for namespace in ("torch", "torch.Tensor")
        for name in "matmul mm mv bmm addmm addmv addbmm baddbmm".split()
    ),
    ("torch.Tensor", "__matmul__"),
    ("torch.Tensor", "__rmatmul__"),
    *(("torch", name) for name in ("einsum", "chain_matmul", "tensordot", "bilinear")),
    ("torch.nn.functional", "bilinear"),
    ("torch.linalg", "matmul"),
    ("torch.linalg", "multi_dot"),
    *(
        ("recurrent layers", name)
        for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for name in (layer, f"{layer}_cell")
    ),
)
"""``(namespace, name)`` of the functions worth running wide; namespaces as in the op table."""

# CPU autocast leaves these as they are, so that its being on does not make a call of them float16.
# At O1 the op table casts their arguments before they come here.
_NOT_CAST: Final = frozenset(
    "mv addmv bilinear lstm gru rnn_tanh rnn_relu lstm_cell gru_cell".split()
)


@functools.cache
def cpu_lacks_fp16_matmul() -> bool:
    """Whether this CPU has no units that multiply float16 matrices.

    Where torch's oneDNN cannot be asked (other builds), x86 is taken to lack them and anything
    else to have them: ARM cores multiply float16 natively.
    """
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    if supported is None:
        return torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2", "AVX512")
    return not supported()


def _leaves(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_leaves(cast("Sequence[Any]", value)))
    return found


def _runs_wide(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether torch would compute this call in float16 on the CPU."""
    tensors = _leaves((*args, *kwargs.values()))
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    if not dtypes or any(t.device.type != "cpu" for t in tensors):
        return False
    if kwargs.get("out") is not None:
        return False
    if torch.is_autocast_enabled("cpu") and name not in _NOT_CAST:
        # Autocast casts bfloat16 inputs to float16 too; float64 it leaves alone.
        return torch.get_autocast_dtype("cpu") is torch.float16 and torch.float64 not in dtypes
    return dtypes == {torch.float16}


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float16).float()


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float16) if tensor.dtype is torch.float32 else tensor


def wide(fn: AnyFunction) -> AnyFunction:
    """Wrap ``fn``, a product, so that calls torch would compute in float16 on the CPU run wide."""

    @functools.wraps(fn)
    def run_wide(*args: Any, **kwargs: Any) -> Any:
        if not _runs_wide(fn.__name__, args, kwargs):
            return fn(*args, **kwargs)
        wide_args = [map_tensors(_widen, arg) for arg in args]
        wide_kwargs = {name: map_tensors(_widen, arg) for name, arg in kwargs.items()}
        with torch.autocast("cpu", enabled=False):
            result = fn(*wide_args, **wide_kwargs)
        return map_tensors(_narrow, result)

    return run_wide
