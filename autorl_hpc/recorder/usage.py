"""Sample what the agent's processes use: `Sweep` (disk), `UsageSampler` (CPU, memory, processes) and `NvmlGpus`."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from autorl_hpc.files.processes import memory_bytes
from autorl_hpc.files.queue import append_event
from autorl_hpc.files.safe_open import DIR_FLAGS, open_below
from autorl_hpc.recorder.process_table import ProcessTable
from autorl_hpc.recorder.watch import LineWriter, Moment
from autorl_hpc.records.recorded import GpuSample, UsageSample

# --- the walk over the workspace, in small slices: for its disk use, and for watches that search files in it.
# One walk serves all. A look takes the same CPU time however large the workspace is; a larger one takes more looks.

SWEEP_S = 1.0
SLICE_S = 0.005
"""CPU seconds of one look: half a percent of a core while a walk lasts."""

PAUSE_S = 10.0
"""From the end of one walk to the start of the next."""

TICK = 32
"""Entries between two checks of the clock."""

FOLDER_AT_ONCE = 2000
"""Entries of one folder before others have their turn, so that a folder with a million entries doesn't delay the others."""

MAX_OPEN = 32
"""Limit of half-read folders, each with a descriptor."""

MAX_WAITING = 200_000
"""Limit of folders still to be walked; beyond it some are skipped and the size is unknown."""

MAX_DEPTH = 64
MAX_LINKED = 200_000
"""Limit of files with several names that are counted once."""

CLOSED, TOO_DEEP, TOO_MANY = "folders_closed", "folders_too_deep", "folders_too_many"
"""Why a walk skips something; the size is then unknown."""

Parts = tuple[str, ...]
Visitor = Callable[[Parts, os.stat_result], None]


class Sweep:
    """The walk, as a watch. Visitors are called in its thread; its figures may be read in any thread."""

    name = "workspace"

    def __init__(self, workspace: Path, events: Path | None = None) -> None:
        """Prepare the walk; `events` is the file in which skipped folders are reported."""
        self.workspace = workspace
        self._events = events
        self.every_s = SWEEP_S
        self.visitors: list[Visitor] = []
        self.disk_bytes: int | None = None
        self._told: set[str] = set()
        self.files = 0
        self.walks = 0
        self._steps: Iterator[None] | None = None

    def look(self, now: Moment) -> None:
        """Continue the walk for SLICE_S at most."""
        steps, self._steps = self._steps or self._walk(), None  # after an error the next look starts again
        until_s = time.thread_time() + SLICE_S
        self.every_s = PAUSE_S
        if not all(time.thread_time() < until_s for _ in steps):
            self._steps, self.every_s = steps, SWEEP_S

    def close(self, now: Moment) -> None:
        """End without a last walk, which could take long."""
        self._steps = None

    def show(self, visitor: Visitor, deadline: float) -> None:
        """Show the workspace's current files to one visitor, in the caller's thread, until the deadline. Raises OSError."""
        walk = _Walk(self.workspace, [visitor])
        try:
            for _ in walk.steps():
                if time.monotonic() >= deadline:
                    return
        finally:
            walk.close()

    def _walk(self) -> Iterator[None]:
        """Walk once. Raises OSError if the workspace itself can't be opened."""
        walk = _Walk(self.workspace, self.visitors)
        try:
            yield from walk.steps()
        finally:
            walk.close()
        self.disk_bytes = walk.disk_bytes if walk.whole else None
        self.files, self.walks = walk.files, self.walks + 1
        self._tell(walk.left_out)

    def _tell(self, left_out: dict[str, int]) -> None:
        """Report each reason once, because a run walks its workspace thousands of times."""
        if self._events is None or self._told.issuperset(left_out):
            return
        self._told |= set(left_out)
        append_event(self._events, "recorder_left_out", watch=self.name, **left_out, disk_bytes_known=False)


class _Walk:
    """One breadth-first walk: files near the top come first."""

    def __init__(self, workspace: Path, visitors: list[Visitor]) -> None:
        self.root_fd = os.open(workspace, DIR_FLAGS)
        self.device = os.fstat(self.root_fd).st_dev
        self.visitors = visitors
        self.disk_bytes = self.files = 0
        self.left_out: dict[str, int] = {}
        self._waiting: deque[Parts] = deque([()])
        self._open: deque[tuple[Parts, int, Any]] = deque()
        self._linked: set[tuple[int, int]] = set()

    @property
    def whole(self) -> bool:
        """Return whether nothing was skipped."""
        return not self.left_out

    def _leave_out(self, why: str) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + 1

    def close(self) -> None:
        """Close all folders."""
        for _, fd, entries in self._open:
            entries.close()
            os.close(fd)
        os.close(self.root_fd)

    def steps(self) -> Iterator[None]:
        """Yield after every few entries."""
        while self._waiting or self._open:
            if self._waiting and len(self._open) < MAX_OPEN:
                self._enter(self._waiting.popleft())
            if self._open:
                yield from self._go_on(*self._open.popleft())

    def _enter(self, parts: Parts) -> None:
        try:
            fd = open_below(self.root_fd, parts, DIR_FLAGS)
        except FileNotFoundError:
            return
        except OSError:
            self._leave_out(CLOSED)  # closed by its owner, or replaced by a link
            return
        try:
            self._open.append((parts, fd, os.scandir(fd)))
        except OSError:
            os.close(fd)
            self._leave_out(CLOSED)

    def _go_on(self, parts: Parts, fd: int, entries: Any) -> Iterator[None]:
        self._open.appendleft((parts, fd, entries))  # so that `close` finds it
        try:
            for number in range(1, FOLDER_AT_ONCE + 1):
                entry = next(entries, None)
                if entry is None:
                    break
                self._meet(parts, entry)
                if number % TICK == 0:
                    yield
            else:
                self._open.rotate(-1)
                return
        except OSError:
            self._leave_out(CLOSED)
        self._open.popleft()
        entries.close()
        os.close(fd)
        yield

    def _meet(self, parts: Parts, entry: os.DirEntry[str]) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        if status.st_dev != self.device:
            return
        here = (*parts, entry.name)
        if stat.S_ISDIR(status.st_mode):
            self._put_off(here)
        elif status.st_nlink > 1 and len(self._linked) < MAX_LINKED:
            if (status.st_dev, status.st_ino) in self._linked:
                return
            self._linked.add((status.st_dev, status.st_ino))
        self.disk_bytes += status.st_blocks * 512
        self.files += 1
        if stat.S_ISREG(status.st_mode):
            for visit in self.visitors:
                visit(here, status)

    def _put_off(self, folder: Parts) -> None:
        if len(folder) > MAX_DEPTH:
            self._leave_out(TOO_DEEP)
        elif len(self._waiting) >= MAX_WAITING:
            self._leave_out(TOO_MANY)
        else:
            self._waiting.append(folder)


LOOK_S = 5.0
LATER_LOOK_S = 60.0
MAX_BYTES = 64 * 2**20
"""Limit of usage.jsonl; from half of it on, samples come every LATER_LOOK_S. A sample with eight GPUs has about 1,300 bytes,
so this is a day and a half every LOOK_S, and two weeks more."""

TABLE_PATIENCE_S = 1.0
"""A process table younger than this is not updated."""

MEMORY_SHARE = 0.0005
"""Share of a core. Counting shared memory once costs a millisecond per large process; in between, the last value is repeated."""

LATEST_MEMORY_S = 60.0


class Gpus(Protocol):
    """Measures GPUs."""

    def samples(self) -> tuple[GpuSample, ...] | None:
        """Return one sample per GPU that the agent may use, for the time since the last call; None if nothing is known yet."""
        ...

    def trouble(self) -> str | None:
        """Return a failure, each once; None if there is none."""
        ...

    def close(self) -> None:
        """Stop measuring."""
        ...


class UsageSampler:
    """Writes a `UsageSample` every LOOK_S.

    Args:
        table: the agent's processes; updated by `Processes`, and here if that is late.
        sweep: provides the workspace's disk use as of the last complete walk.
    """

    name = "usage"

    def __init__(self, table: ProcessTable, sweep: Sweep, gpus: Gpus, path: Path) -> None:
        self.table = table
        self.sweep = sweep
        self.gpus = gpus
        self.every_s = LOOK_S
        self._lines = LineWriter(path, MAX_BYTES)
        self._memory: int | None = None
        self._next_memory = 0.0

    def look(self, now: Moment) -> None:
        """Write one sample. Then raises RuntimeError if a GPU could not be measured."""
        self._sample(now)
        if self._lines.size > MAX_BYTES // 2:
            self.every_s = LATER_LOOK_S
        if (trouble := self.gpus.trouble()) is not None:
            raise RuntimeError(trouble)

    def close(self, now: Moment) -> None:
        """Write the last sample."""
        try:
            self._sample(now, patience_s=0.0)
        finally:
            self.gpus.close()
            self._lines.close()

    def _sample(self, now: Moment, patience_s: float = TABLE_PATIENCE_S) -> None:
        looked = self._look_at_processes(patience_s)
        sample = {
            **now.told(),
            "cpu_s": round(self.table.cpu_s, 2) if looked else None,
            "memory_bytes": self._measured_memory(self.table.living) if looked else None,
            "processes": self.table.count if looked else None,
            "disk_bytes": self.sweep.disk_bytes,
            "gpus": self.gpus.samples(),
        }
        self._lines.add(UsageSample.model_validate(sample))

    def _look_at_processes(self, patience_s: float) -> bool:
        try:
            self.table.look(patience_s)
        except OSError:
            return False
        return True

    def _measured_memory(self, living: set[int]) -> int | None:
        if not living:
            return 0
        begun = time.monotonic()
        if begun >= self._next_memory:
            try:
                self._memory = int(memory_bytes(living, 0))
            except OSError:
                self._memory = None
            took_s = time.monotonic() - begun
            self._next_memory = begun + min(LATEST_MEMORY_S, took_s / MEMORY_SHARE)
        return self._memory


# --- GPUs that the agent may use, by NVML, in their own thread, because a faulty driver answers late or never.
# NVML numbers the GPUs that this process may open in PCI order; so does CUDA if all are equal, or with
# CUDA_DEVICE_ORDER=PCI_BUS_ID.

MEASURE_S = 2.5
"""NVML stores about ten seconds of samples; this gives two measurements per sample of `UsageSampler`."""

LATE_S = 15.0
"""Older figures are not reported."""


class NvmlGpus:
    """Measures GPUs until it is closed. Without an NVIDIA driver or a GPU for the agent, samples are an empty tuple.

    Args:
        environment: the agent's: CUDA_VISIBLE_DEVICES (numbers, GPU-..., MIG-...), or else SLURM_JOB_GPUS of the job.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._busy: dict[str, list[float]] = {}
        self._latest: tuple[GpuSample, ...] | None = None
        self._measured_at = time.monotonic()
        self._troubles: list[str] = []
        self._told: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)
        self._thread.start()

    def samples(self) -> tuple[GpuSample, ...] | None:
        """Return the newest samples; their use is the mean since the last call. Fields are null if NVML can't provide them or
        is late. Empty if there is no GPU; None if nothing is known yet."""
        with self._lock:
            busy, self._busy = self._busy, {}
            latest = self._latest
            late = time.monotonic() - self._measured_at > LATE_S
        if latest is None:
            return None
        if late and latest:
            self._say(f"NVML has not answered for {LATE_S:g} s")
            return tuple(GpuSample(index=gpu.index, name=gpu.name, uuid=gpu.uuid) for gpu in latest)
        return tuple(gpu.model_copy(update={"used_share": _mean(busy.get(gpu.uuid, []))}) for gpu in latest)

    def trouble(self) -> str | None:
        """Return the next failure, each once; None if there is none."""
        with self._lock:
            return self._troubles.pop(0) if self._troubles else None

    def close(self) -> None:
        """End the thread; one that hangs in the driver is abandoned."""
        self._closing.set()
        self._thread.join(timeout=1.0)

    def _say(self, trouble: str) -> None:
        with self._lock:
            if trouble not in self._told and len(self._told) < 20:
                self._told.add(trouble)
                self._troubles.append(trouble)

    def _run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:
            if not _no_gpu_here(error):
                self._say(f"NVML can't be used: {error}")
            else:
                with self._lock:
                    self._latest = ()
            return
        try:
            devices = chosen(_all_devices(pynvml), self._environment)
            readers = [_Reader(pynvml, device, self._say) for device in devices]
            while True:
                found = [reader.read() for reader in readers]
                with self._lock:
                    self._latest = tuple(sample for sample, _ in found)
                    self._measured_at = time.monotonic()
                    for sample, busy in found:
                        self._busy.setdefault(sample.uuid, []).extend(busy)
                        del self._busy[sample.uuid][:-1000]
                if not readers or self._closing.wait(MEASURE_S):
                    return
        except Exception as error:  # NVML is a C library: whatever it raises, the other figures must go on
            self._say(f"GPUs can't be measured: {error}")
        finally:
            try:
                pynvml.nvmlShutdown()
            except Exception as error:
                self._say(f"NVML can't be ended: {error}")


class Device:
    """One GPU or MIG slice that NVML shows."""

    def __init__(self, index: int, uuid: str, handle: Any, is_slice: bool = False) -> None:
        self.index = index
        self.uuid = uuid
        self.handle = handle
        self.is_slice = is_slice


def chosen(devices: list[Device], environment: Mapping[str, str]) -> list[Device]:
    """Return the devices that CUDA would show in this environment. A name may be the beginning of an identifier. As in CUDA,
    the list ends at the first entry that names no device. Without CUDA_VISIBLE_DEVICES, SLURM_JOB_GPUS, which numbers all
    of the node's GPUs, is used only if more are visible than it names."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    whole = [device for device in devices if not device.is_slice]
    if named is None:
        job = [part.strip() for part in environment.get("SLURM_JOB_GPUS", "").split(",") if part.strip()]
        if job and len(job) < len(whole):
            return [device for device in whole if str(device.index) in job]
        return whole
    found: list[Device] = []
    for part in named.split(","):
        name = part.strip()
        if name.isdigit():
            matching = [device for device in whole if device.index == int(name)]
        else:
            matching = [device for device in devices if name and device.uuid.startswith(name)]
        if len(matching) != 1:
            break
        found.append(matching[0])
    return found


def _all_devices(nvml: Any) -> list[Device]:
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(Device(index, _text(nvml.nvmlDeviceGetUUID(handle)), handle))
        except nvml.NVMLError:
            continue  # this process may not open it
        found += _slices(nvml, index, handle)
    return found


def _slices(nvml: Any, index: int, handle: Any) -> list[Device]:
    found = []
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                found.append(Device(index, _text(nvml.nvmlDeviceGetUUID(part)), part, is_slice=True))
            except nvml.NVMLError:
                continue
    except nvml.NVMLError:
        pass  # no MIG on this GPU
    return found


class _Reader:
    """Reads one device. What the device can't provide is null; real failures are reported."""

    def __init__(self, nvml: Any, device: Device, say: Any) -> None:
        self.nvml = nvml
        self.device = device
        self.say = say
        self.name = _text(self._ask("nvmlDeviceGetName") or "")
        self._seen_us = 0

    def read(self) -> tuple[GpuSample, list[float]]:
        """Return (sample, shares of time with a kernel running since the last reading, one per short period of NVML)."""
        memory, power_mw = self._memory(), None if self.device.is_slice else self._ask("nvmlDeviceGetPowerUsage")
        sample = GpuSample(
            index=self.device.index,
            name=self.name,
            uuid=self.device.uuid,
            memory_bytes=memory[0],
            memory_total_bytes=memory[1],
            power_w=None if power_mw is None else power_mw / 1000,
        )
        return sample, self._busy()

    def _memory(self) -> tuple[int | None, int | None]:
        # The second version excludes the driver's own memory, which isn't the agent's.
        info = self._ask("nvmlDeviceGetMemoryInfo", getattr(self.nvml, "nvmlMemory_v2", None))
        info = info if info is not None else self._ask("nvmlDeviceGetMemoryInfo")
        return (None, None) if info is None else (int(info.used), int(info.total))

    def _busy(self) -> list[float]:
        """Return shares of busy time since the last call; empty for MIG slices, for which NVML has none."""
        if self.device.is_slice:
            return []
        try:
            _, samples = self.nvml.nvmlDeviceGetSamples(
                self.device.handle, self.nvml.NVML_GPU_UTILIZATION_SAMPLES, self._seen_us
            )
            fresh = [sample for sample in samples if sample.timeStamp > self._seen_us]
            if fresh:
                first, self._seen_us = self._seen_us == 0, max(sample.timeStamp for sample in fresh)
                # The first call also returns samples from before the agent began.
                return [_share(sample.sampleValue.uiVal) for sample in (fresh[-1:] if first else fresh)]
        except (self.nvml.NVMLError, AttributeError):
            pass  # not every GPU stores samples
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        return [] if rates is None else [_share(rates.gpu)]

    def _ask(self, function: str, *arguments: Any) -> Any | None:
        try:
            return getattr(self.nvml, function)(self.device.handle, *[a for a in arguments if a is not None])
        except self.nvml.NVMLError as error:
            if error.value not in (self.nvml.NVML_ERROR_NOT_SUPPORTED, self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self.say(f"{function} of GPU {self.device.index}: {error}")
            return None


def _no_gpu_here(error: Exception) -> bool:
    """Return whether NVML reports that there is no driver or no library; other errors are failures."""
    value = getattr(error, "value", None)
    return isinstance(error, ImportError) or value in (9, 12)  # DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND


def _share(percent: int) -> float:
    return min(1.0, max(0.0, percent / 100))


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
