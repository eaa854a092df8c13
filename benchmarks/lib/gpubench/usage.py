"""How busy the GPU is while something runs: NVML's utilisation, ten times a second."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Any

PERIOD_S = 0.1


class Usage:
    """`with Usage() as usage: ...`, then `usage.share()`.

    NVML says for which share of its last window (a sixth of a second to a second, by model) some kernel ran: one small kernel
    after the other counts as busy, so this is an upper bound of how well a GPU is used.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []  # monotonic time, share
        self.trouble: str | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)

    def __enter__(self) -> Usage:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join(timeout=5.0)

    def share(self, since: float = 0.0, until: float = float("inf")) -> float | None:
        """The mean share between two times of the monotonic clock; None if there are no samples."""
        within = [share for at, share in self.samples if since <= at <= until]
        return sum(within) / len(within) if within else None

    def _run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = _handle(pynvml)
            while not self._ending.wait(PERIOD_S):
                used = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
                self.samples.append((time.monotonic(), used / 100.0))
            pynvml.nvmlShutdown()
        except Exception as error:  # no driver, no library, a MIG slice: the other figures go on
            self.trouble = f"{type(error).__name__}: {error}"


def _handle(pynvml: Any) -> Any:
    """The first GPU that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if named.startswith(("GPU-", "MIG-")):
        return pynvml.nvmlDeviceGetHandleByUUID(named)
    return pynvml.nvmlDeviceGetHandleByIndex(int(named) if named.isdigit() else 0)


def used_bytes() -> int | None:
    """Memory of the GPU that is in use, by all processes; None: NVML can't tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(_handle(pynvml)).used)
    except Exception:
        return None


FREE_SHARE = 0.93
"""What vLLM asks of a card by default is 0.9 of its memory, free when it starts."""


def wait_until_free(limit_s: float = 60.0) -> float | None:
    """Waits until the GPU's memory is free again; the share that is. None: NVML can't tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle, deadline = _handle(pynvml), time.monotonic() + limit_s
        while True:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            share = float(memory.free) / float(memory.total)
            if share >= FREE_SHARE or time.monotonic() > deadline:
                return share
            time.sleep(0.2)
    except Exception:
        return None
