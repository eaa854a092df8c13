"""Sample what the agent uses: `Sweep` (disk), `Gpus` (by NVML) and `UsageSampler`, which writes both beside CPU and memory."""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.files.processes import memory_bytes
from autorl_hpc.files.queue import append_event
from autorl_hpc.recorder.process_table import Processes
from autorl_hpc.recorder.watch import LineWriter, Moment, Visitor, WorkspaceWalk
from autorl_hpc.records.recorded import GpuSample, UsageSample

SWEEP_S = 1.0
SLICE_S = 0.005  # CPU seconds of one look: half a percent of a core while a walk lasts
PAUSE_S = 10.0  # from the end of one walk to the start of the next


class Sweep:
    """The walk over the workspace: its disk use, and files for other watches (`visitors`, called in its thread). A look takes
    the same CPU time however large the workspace is. `events`: file in which skipped folders are reported."""

    def __init__(self, workspace: Path, events: Path | None = None, slice_s: float = SLICE_S) -> None:
        self.workspace, self.every_s, self.walks = workspace, SWEEP_S, 0
        self.visitors: list[Visitor] = []
        self.disk_bytes: int | None = None
        self._events, self._slice_s = events, slice_s
        self._reported: set[str] = set()
        self._steps: Iterator[None] | None = None

    def look(self, now: Moment) -> None:
        steps, self._steps = self._steps or self._walk(), None  # after an error the next look starts again
        until_s = time.thread_time() + self._slice_s
        self.every_s = PAUSE_S
        if not all(time.thread_time() < until_s for _ in steps):
            self._steps, self.every_s = steps, SWEEP_S

    def close(self, now: Moment) -> None:
        self._steps = None

    def show(self, visitor: Visitor, deadline: float) -> None:
        """Show the workspace's current files to one visitor, in the caller's thread, until the deadline. Raises OSError."""
        for _ in WorkspaceWalk([visitor]).steps(self.workspace):
            if time.monotonic() >= deadline:
                return

    def _walk(self) -> Iterator[None]:
        walk = WorkspaceWalk(self.visitors)
        yield from walk.steps(self.workspace)
        self.disk_bytes = None if walk.left_out else walk.disk_bytes
        self.walks += 1
        if self._events is not None and not self._reported.issuperset(walk.left_out):  # each reason once
            self._reported |= set(walk.left_out)
            append_event(self._events, "recorder_left_out", watch="workspace", **walk.left_out, disk_bytes_known=False)


# --- GPUs that the agent may use, by NVML. A watch of its own, because a faulty driver answers late or never.
# NVML numbers the GPUs that this process may open in PCI order; so does CUDA if all are equal, or with
# CUDA_DEVICE_ORDER=PCI_BUS_ID.

MEASURE_S = 2.5  # NVML stores about ten seconds of samples; this gives two measurements per sample of `UsageSampler`
LATE_S = 15.0  # older figures are not reported
MAX_BUSY = 1000
NO_DRIVER = (9, 12)  # errors of NVML: DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND


@dataclass(frozen=True)
class Device:
    index: int
    uuid: str
    handle: Any
    is_slice: bool = False


class Gpus:
    """The watch over the GPUs that `chosen` finds in the agent's environment. Without an NVIDIA driver or a GPU, samples are an
    empty tuple."""

    every_s = MEASURE_S

    def __init__(self, environment: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._environment = clock, dict(environment)
        self._nvml: Any = None
        self._devices: list[Device] | None = None
        self._busy: defaultdict[str, list[float]] = defaultdict(list)
        self._seen_us: dict[str, int] = {}
        self._latest: tuple[GpuSample, ...] | None = None
        self._measured_at = 0.0

    def look(self, now: Moment) -> None:
        if self._devices is None:
            self._devices = []
            self._devices = self._begin()
        if self._nvml is not None:
            self._latest = tuple(self._measure(device) for device in self._devices)
            self._measured_at = self._clock()

    def close(self, now: Moment) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()

    def samples(self) -> tuple[GpuSample, ...] | None:
        """Return the newest samples; their use is the mean since the last call. Fields are null if NVML can't provide them or
        is late. Empty if there is no GPU; None if nothing is known yet. May be called in any thread."""
        busy, self._busy = self._busy, defaultdict(list)
        if self._latest is None:
            return None
        if self._clock() - self._measured_at > LATE_S:
            return tuple(GpuSample(index=gpu.index, name=gpu.name, uuid=gpu.uuid) for gpu in self._latest)
        means = {uuid: round(sum(shares) / len(shares), 4) for uuid, shares in busy.items() if shares}
        return tuple(gpu.model_copy(update={"used_share": means.get(gpu.uuid)}) for gpu in self._latest)

    def _begin(self) -> list[Device]:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:
            if not isinstance(error, ImportError) and getattr(error, "value", None) not in NO_DRIVER:
                raise RuntimeError(f"NVML can't be used: {error}") from None
            self._latest = ()
            return []
        self._nvml = pynvml
        return chosen(_all_devices(pynvml), self._environment)

    def _measure(self, device: Device) -> GpuSample:
        # The second version of the memory's figures excludes the driver's own memory, which isn't the agent's.
        memory = self._ask(device, "nvmlDeviceGetMemoryInfo", getattr(self._nvml, "nvmlMemory_v2", None))
        memory = self._ask(device, "nvmlDeviceGetMemoryInfo") if memory is None else memory
        power_mw = None if device.is_slice else self._ask(device, "nvmlDeviceGetPowerUsage")
        if not device.is_slice:  # NVML has no use of a MIG slice
            shares = [min(1.0, max(0.0, share)) for share in self._shares(device)]
            self._busy[device.uuid] = (self._busy[device.uuid] + shares)[-MAX_BUSY:]
        return GpuSample(
            **{"index": device.index, "uuid": device.uuid, "name": _text(self._ask(device, "nvmlDeviceGetName") or "")},
            memory_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_w=None if power_mw is None else power_mw / 1000,
        )

    def _shares(self, device: Device) -> list[float]:
        seen_us = self._seen_us.get(device.uuid, 0)
        try:
            kind = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
            _, samples = self._nvml.nvmlDeviceGetSamples(device.handle, kind, seen_us)
            fresh = [sample for sample in samples if sample.timeStamp > seen_us]
            if fresh:
                self._seen_us[device.uuid] = max(sample.timeStamp for sample in fresh)
                # The first call also returns samples from before the agent began.
                return [sample.sampleValue.uiVal / 100 for sample in (fresh if seen_us else fresh[-1:])]
        except (self._nvml.NVMLError, AttributeError):
            pass  # not every GPU stores samples
        rates = self._ask(device, "nvmlDeviceGetUtilizationRates")
        return [] if rates is None else [rates.gpu / 100]

    def _ask(self, device: Device, function: str, *arguments: Any) -> Any | None:
        try:
            return getattr(self._nvml, function)(device.handle, *[a for a in arguments if a is not None])
        except self._nvml.NVMLError:
            return None


def chosen(devices: list[Device], environment: Mapping[str, str]) -> list[Device]:
    """Return the devices that CUDA would show in this environment. A name may be the beginning of an identifier. As in CUDA,
    the list ends at the first entry that names no device. Without CUDA_VISIBLE_DEVICES, SLURM_JOB_GPUS, which numbers all
    of the node's GPUs (`0,2-3`; empty: the job has none), is used only if more are visible than it names."""
    named, of_job = environment.get("CUDA_VISIBLE_DEVICES"), environment.get("SLURM_JOB_GPUS")
    whole = [device for device in devices if not device.is_slice]
    if named is None and of_job is None:
        return whole
    if named is None:
        spans = re.findall(r"(\d+)(?:-(\d+))?", of_job or "")
        numbers = {number for first, last in spans for number in range(int(first), int(last or first) + 1)}
        return whole if len(numbers) >= len(whole) else [device for device in whole if device.index in numbers]
    found: list[Device] = []
    for name in map(str.strip, named.split(",")):
        if name.isdigit():
            matching = [device for device in whole if device.index == int(name)]
        else:
            matching = [device for device in devices if name and device.uuid.startswith(name)]
        if len(matching) != 1:
            break
        found.append(matching[0])
    return found


def _all_devices(nvml: Any) -> list[Device]:
    """Return GPUs and MIG slices. What fails is not there: a GPU that this process may not open, or one without MIG."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(Device(index, _text(nvml.nvmlDeviceGetUUID(handle)), handle))
            has_slices = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
            for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if has_slices else 0):
                with contextlib.suppress(nvml.NVMLError):
                    part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                    found.append(Device(index, _text(nvml.nvmlDeviceGetUUID(part)), part, is_slice=True))
    return found


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


LOOK_S = 5.0
LATER_LOOK_S = 60.0
MAX_BYTES = 64 * 2**20
"""Limit of usage.jsonl; from half of it on, samples come every LATER_LOOK_S. A sample with eight GPUs has about 1,300 bytes,
so this is a day and a half every LOOK_S, and two weeks more."""


class UsageSampler:
    """Writes a `UsageSample` every LOOK_S; the workspace's disk use is that of the last complete walk."""

    every_s = LOOK_S

    def __init__(self, processes: Processes, sweep: Sweep, gpus: Gpus, path: Path) -> None:
        self._processes, self._sweep, self._gpus = processes, sweep, gpus
        self._lines = LineWriter(path, MAX_BYTES)

    def look(self, now: Moment) -> None:
        use = self._processes.use
        self._lines.add(
            UsageSample(
                **now.fields(),
                cpu_s=None if use is None else round(use.cpu_s, 2),
                memory_bytes=None if use is None else _memory_of(use.living),
                processes=None if use is None else use.running,
                disk_bytes=self._sweep.disk_bytes,
                gpus=self._gpus.samples(),
            )
        )
        if self._lines.size > MAX_BYTES // 2:
            self.every_s = LATER_LOOK_S

    def close(self, now: Moment) -> None:
        try:
            self.look(now)
        finally:
            self._lines.close()


def _memory_of(living: set[int]) -> int | None:
    try:
        return int(memory_bytes(living, 0)) if living else 0
    except OSError:
        return None
