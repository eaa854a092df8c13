"""What the GPUs do that the agent may use, by NVML. Measured in a thread of its own: a driver in trouble answers late or never.

NVML numbers the GPUs that this process may open, in PCI order; so does CUDA with equal GPUs, and with CUDA_DEVICE_ORDER=PCI_BUS_ID
else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from autorl_hpc.records.recorded import GpuSample

MEASURE_S = 2.5
"""NVML keeps some ten seconds of samples: two measurements in one of `Usage`."""

LATE_S = 15.0
"""Older figures are not told any more."""


class NvmlGpus:
    """Measures GPUs until it is closed; no NVIDIA driver, or no GPU for the agent, is an empty tuple.

    Args:
        environment: of the agent: CUDA_VISIBLE_DEVICES (numbers, GPU-..., MIG-...), else SLURM_JOB_GPUS of the job.
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
        """The newest figures; use is the mean since the last call. Null where NVML can't tell, or is late.

        Empty: there is no GPU. None: nobody knows yet, or can.
        """
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
        """The next thing that went wrong; each is told once."""
        with self._lock:
            return self._troubles.pop(0) if self._troubles else None

    def close(self) -> None:
        """Ends the thread; one that hangs in the driver is left behind."""
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
        except Exception as error:  # NVML's library is a C library's: whatever it raises, the other figures go on
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
    """The devices that CUDA would show under this environment.

    A name may be the beginning of an identifier. As CUDA does, the list ends at the first entry that names no device. With no
    CUDA_VISIBLE_DEVICES, SLURM_JOB_GPUS counts all of the node's GPUs: it chooses only where more can be seen than it names.
    """
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
            continue  # one that this process may not open
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
    """Reads one device; what it can't tell is null, and a real failure is said."""

    def __init__(self, nvml: Any, device: Device, say: Any) -> None:
        self.nvml = nvml
        self.device = device
        self.say = say
        self.name = _text(self._ask("nvmlDeviceGetName") or "")
        self._seen_us = 0

    def read(self) -> tuple[GpuSample, list[float]]:
        """(sample, shares of time with a kernel since the last reading, by NVML's own short periods)."""
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
        # The second version tells the driver's own share apart; it isn't the agent's.
        info = self._ask("nvmlDeviceGetMemoryInfo", getattr(self.nvml, "nvmlMemory_v2", None))
        info = info if info is not None else self._ask("nvmlDeviceGetMemoryInfo")
        return (None, None) if info is None else (int(info.used), int(info.total))

    def _busy(self) -> list[float]:
        """NVML has no use of MIG slices."""
        if self.device.is_slice:
            return []
        try:
            _, samples = self.nvml.nvmlDeviceGetSamples(
                self.device.handle, self.nvml.NVML_GPU_UTILIZATION_SAMPLES, self._seen_us
            )
            fresh = [sample for sample in samples if sample.timeStamp > self._seen_us]
            if fresh:
                first, self._seen_us = self._seen_us == 0, max(sample.timeStamp for sample in fresh)
                # At first NVML gives what it kept from before the agent began.
                return [_share(sample.sampleValue.uiVal) for sample in (fresh[-1:] if first else fresh)]
        except (self.nvml.NVMLError, AttributeError):
            pass  # not every GPU keeps samples
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
    """Whether NVML says that there is no driver or no library; anything else is a trouble."""
    value = getattr(error, "value", None)
    return isinstance(error, ImportError) or value in (9, 12)  # DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND


def _share(percent: int) -> float:
    return min(1.0, max(0.0, percent / 100))


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
