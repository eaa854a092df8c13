"""Which GPUs a grader has, in the words of CUDA_VISIBLE_DEVICES, and how engines share them out.

An entry is an index (`0`), a GPU (`GPU-5a1c...`) or a slice of one (`MIG-9e2f...`). vLLM takes entries for numbers in many places, so
whole GPUs are handed to it by index, in the order of the bus (CUDA_DEVICE_ORDER), which is the driver's own; slices have no index.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.states import Fault

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
NOTHING = frozenset({"", "-1", "none", "void", "NoDevFiles"})
"""How schedulers and container tools say that there is no GPU; CUDA itself stops at the first entry that it can't use."""

_DEVICE = re.compile(r"nvidia\d+")


def is_slice(entry: str) -> bool:
    """Whether it is a part of a GPU."""
    return entry.startswith("MIG-")


def visible(environ: Mapping[str, str] = os.environ, count: Callable[[], int] | None = None) -> list[str]:
    """The GPUs that this process may use, as entries.

    Args:
        count: GPUs of the node, for where nothing is said.
    """
    given = environ.get(VARIABLE)
    if given is None:
        return [str(number) for number in range((count or _on_this_node)())]
    found: list[str] = []
    for entry in (part.strip() for part in given.split(",")):
        if entry in NOTHING:
            break
        if entry not in found:
            found.append(entry)
    return found


def shares(entries: Sequence[str], each: int) -> list[list[str]]:
    """Groups of `each` GPUs, one for a replica; what is left over is not used.

    Raises:
        AutorlError: there are not enough, or slices would have to work together.
    """
    if len(entries) < each:
        raise AutorlError(
            f"the grader has {len(entries)} GPUs, `tensor_parallel` needs {each}",
            where=f"{VARIABLE}={','.join(entries)}",
            fault=Fault.CLUSTER,
            next_step="ask for more GPUs in `resources.grader.gpus`, or set `grader.tensor_parallel` lower",
            exit_code=Exit.ENVIRONMENT,
        )
    if each > 1 and any(map(is_slice, entries)):
        raise AutorlError(
            "slices of GPUs (MIG) can't hold one model together: NCCL doesn't reach from one to another",
            where=f"{VARIABLE}={','.join(entries)}",
            fault=Fault.CLUSTER,
            next_step="set `grader.tensor_parallel: 1`, or ask for whole GPUs",
            exit_code=Exit.ENVIRONMENT,
        )
    return [list(entries[at : at + each]) for at in range(0, len(entries) - each + 1, each)]


def environment(share: Sequence[str], index_of: Callable[[str], int | None] | None = None) -> dict[str, str]:
    """The variables by which a process sees these GPUs and no others.

    Args:
        index_of: the index of a GPU by its UUID, None where that can't be had: then the UUID stays.
    """
    entries = []
    by_bus = False
    for entry in share:
        index = (index_of or _index_of)(entry) if entry.startswith("GPU-") else None
        by_bus = by_bus or index is not None
        entries.append(entry if index is None else str(index))
    variables = {VARIABLE: ",".join(entries)}
    if by_bus:
        variables[ORDER_VARIABLE] = "PCI_BUS_ID"
    return variables


def _on_this_node() -> int:
    """By the device files: the driver's library need not be loaded."""
    try:
        return sum(1 for name in os.listdir("/dev") if _DEVICE.fullmatch(name))
    except OSError:
        return 0


def _index_of(entry: str) -> int | None:
    """By the driver's library. A job that may use some of the node's GPUs sees those alone, counted anew, as CUDA does."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
                if (uuid if isinstance(uuid, str) else uuid.decode()).startswith(entry):  # CUDA takes a beginning too
                    return index
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no library, no driver, or an old one: the UUID stays, and CUDA knows it
        return None
    return None
