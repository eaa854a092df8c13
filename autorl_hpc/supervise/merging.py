"""The sum of a base weight and a LoRA adapter, a block of rows at a time: W + (B @ A) * scale, as in peft's merge.

Computed in fp32 and rounded to nearest even to the base's dtype.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from autorl_hpc.errors import Refused
from autorl_hpc.files.checkpoint import ITEM_BYTES, TensorSpec
from autorl_hpc.supervise.adapters import ADAPTER_WEIGHTS, Adapter
from autorl_hpc.supervise.blas import use_one_thread

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float32]
    Bits = npt.NDArray[np.uint32]

BLOCK_VALUES = 256 * 1024
"""1 MiB in fp32: the steps of one block find it in the cache."""


class Merge:
    """Adds one delta to the rows of a base weight. Holds A in fp32; B is read by blocks of rows."""

    def __init__(self, adapter: Adapter, target: TensorSpec) -> None:
        """Reads A.

        Args:
            target: the base model's tensor, (out, in).

        Raises:
            Refused: A holds NaN or Inf, or the file became shorter.
            OSError: the file system failed.
        """
        import numpy as np

        use_one_thread()
        self.fd, self.delta, self.target = adapter.fd, adapter.deltas[target.name], target
        self.a = self._factor(self.delta.a, 0, self.delta.a.shape[0])
        self.scale = np.float32(self.delta.scale)
        rows, columns = target.shape
        self.block = min(rows, max(1, BLOCK_VALUES // columns))
        self._change, self._sum = (np.empty((self.block, columns), np.float32) for _ in range(2))
        self._spare = np.empty((self.block, columns), np.uint32)

    def add_to(self, raw: memoryview, first: int) -> None:
        """Adds the adapter to some rows, in place.

        Args:
            raw: the base's bytes of whole rows, in the base's dtype; writable.
            first: number of the first of them.

        Raises:
            Refused: B, or the sum, holds NaN or Inf; or the adapter's file became shorter.
            OSError: the file system failed.
        """
        import numpy as np

        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[self.target.dtype]
        weights = np.frombuffer(raw, dtype=kind).reshape(-1, self.target.shape[1])
        b = self._factor(self.delta.b, first, len(weights))
        for start in range(0, len(weights), self.block):
            part = weights[start : start + self.block]
            change, total, spare = self._change[: len(part)], self._sum[: len(part)], self._spare[: len(part)]
            with np.errstate(all="ignore"):
                np.matmul(b[start : start + self.block], self.a, out=change)
                change *= self.scale
                widen(part, self.target.dtype, total)
                total += change
                if not np.isfinite(total).all():
                    raise _not_finite(f"{self.target.name} with the adapter added")
                stored = narrow(total, self.target.dtype, spare)
            # Where nothing is added the bytes stay: -0.0 + 0.0 would be 0.0, and an untrained adapter not the base model.
            np.copyto(part, stored, where=change != 0, casting="unsafe")

    def _factor(self, tensor: TensorSpec, first: int, count: int) -> Matrix:
        """Rows of A or B in fp32."""
        import numpy as np

        row = tensor.shape[1] * ITEM_BYTES[tensor.dtype]
        data, begin = bytearray(count * row), tensor.begin + first * row
        got = 0
        while got < len(data):
            part = os.preadv(self.fd, [memoryview(data)[got:]], begin + got)
            if part <= 0:
                raise Refused(
                    "artifact_changed",
                    f"{ADAPTER_WEIGHTS} became shorter while it was merged",
                    "submit after the save has ended",
                )
            got += part
        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor.dtype]
        raw = np.frombuffer(data, dtype=kind).reshape(count, tensor.shape[1])
        values = np.empty(raw.shape, np.float32)
        widen(raw, tensor.dtype, values)
        if not np.isfinite(values).all():
            raise _not_finite(tensor.name[:150])
        return values


def _not_finite(name: str) -> Refused:
    what = f"{ADAPTER_WEIGHTS}: {name} holds NaN or Inf"
    return Refused("not_finite", what, "the training diverged: submit an earlier adapter")


def widen(stored: npt.NDArray[Any], dtype: str, into: Matrix) -> None:
    """Writes values of a safetensors dtype (F32, F16; BF16 as uint16) as fp32; exact."""
    import numpy as np

    if dtype == "BF16":
        bits = into.view(np.uint32)
        np.copyto(bits, stored)
        bits <<= 16
    else:
        np.copyto(into, stored)


def narrow(values: Matrix, dtype: str, spare: Bits) -> npt.NDArray[Any]:
    """Finite fp32 values in a safetensors dtype, rounded to nearest even; too large ones become Inf.

    Args:
        values: may be overwritten.
        spare: room of the same shape.

    Returns:
        fp32, fp16, or for BF16 its bits in the lower half of uint32.
    """
    import numpy as np

    if dtype == "F32":
        return values
    if dtype == "F16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    np.right_shift(bits, 16, out=spare)
    spare &= 1
    spare += 0x7FFF
    bits += spare
    bits >>= 16
    return bits
