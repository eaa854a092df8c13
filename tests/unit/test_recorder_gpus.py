"""Which GPUs are the agent's, and a driver that isn't there, fails or hangs. Real GPUs: tests/gpu/test_recorder_gpu.py."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers import PATIENCE_S, wait_for

from autorl_hpc.recorder import usage
from autorl_hpc.recorder.usage import Device, NvmlGpus, chosen
from autorl_hpc.records.recorded import GpuSample

DEVICES = [
    Device(0, "GPU-5e1a0000-aa", None),
    Device(0, "MIG-11110000-aa", None, is_slice=True),
    Device(0, "MIG-22220000-aa", None, is_slice=True),
    Device(1, "GPU-5e1b0000-bb", None),
    Device(2, "GPU-77770000-cc", None),
]


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, ["GPU-5e1a", "GPU-5e1b", "GPU-7777"]),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, ["GPU-5e1a", "GPU-7777"]),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, ["GPU-7777", "GPU-5e1a"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5e1b"}, ["GPU-5e1b"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5e1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "MIG-22220000-aa,MIG-1111"}, ["MIG-2222", "MIG-1111"]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ["GPU-5e1b"]),
        ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, ["GPU-5e1b"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ({"SLURM_JOB_GPUS": "1"}, ["GPU-5e1b"]),
        ({"SLURM_JOB_GPUS": "4,5,6"}, ["GPU-5e1a", "GPU-5e1b", "GPU-7777"]),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_GPUS": "2"}, ["GPU-5e1a"]),
    ],
)
def test_which_gpus_are_the_agents(environment: dict[str, str], names: list[str]) -> None:
    assert [device.uuid[:8] for device in chosen(DEVICES, environment)] == names


class FakeError(Exception):
    """As pynvml.NVMLError: `value` says which."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def library(**functions: Any) -> ModuleType:
    """An NVML with one GPU, whose functions can be replaced."""

    def unsupported(*_: Any) -> Any:
        raise FakeError(3)

    module = ModuleType("pynvml")
    common = {
        "NVMLError": FakeError,
        "NVML_ERROR_NOT_SUPPORTED": 3,
        "NVML_ERROR_FUNCTION_NOT_FOUND": 13,
        "NVML_DEVICE_MIG_ENABLE": 1,
        "NVML_GPU_UTILIZATION_SAMPLES": 1,
        "nvmlMemory_v2": 2,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: b"GPU-1",
        "nvmlDeviceGetMigMode": unsupported,
        "nvmlDeviceGetName": lambda handle: "Fake",
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: SimpleNamespace(used=5, total=10),
        "nvmlDeviceGetPowerUsage": lambda handle: 250_500,
        "nvmlDeviceGetSamples": unsupported,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=40),
    }
    for name, value in {**common, **functions}.items():
        setattr(module, name, value)
    return module


def measured(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None) -> NvmlGpus:
    """Has measured once, or found out why it can't."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(usage, "MEASURE_S", 0.05)
    found = NvmlGpus({})
    wait_for(lambda: found._latest is not None or not found._thread.is_alive(), "the first figures")
    return found


def seen(found: NvmlGpus) -> tuple[GpuSample, ...]:
    samples = found.samples()
    assert samples is not None
    return samples


def test_figures_in_the_records_units(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, library())
    (sample,) = seen(found)
    assert (sample.used_share, sample.memory_bytes, sample.memory_total_bytes, sample.power_w) == (0.4, 5, 10, 250.5)
    assert found.trouble() is None
    found.close()


def test_use_is_the_mean_since_the_last_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [0], [0]

    def samples(handle: int, kind: int, since_us: int) -> tuple[int, list[SimpleNamespace]]:
        asked[0] += 1
        clock[0] += 100
        values = (100, 0) if clock[0] > 100 else (7, 50)
        return 1, [
            SimpleNamespace(timeStamp=clock[0] + n, sampleValue=SimpleNamespace(uiVal=v)) for n, v in enumerate(values)
        ]

    found = measured(monkeypatch, library(nvmlDeviceGetSamples=samples))
    wait_for(lambda: len(found._busy["GPU-1"]) > 0, "what was before")
    found.samples()
    before = asked[0]
    wait_for(lambda: asked[0] > before + 1, "a measurement that began after that")
    assert seen(found)[0].used_share == 0.5
    assert seen(found)[0].used_share in (None, 0.5), "nothing new is not zero"
    found.close()


@pytest.mark.parametrize("module", [None, "no driver", "no library"])
def test_no_gpu_is_an_empty_tuple_and_no_trouble(module: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise FakeError(9 if module == "no driver" else 12)

    found = measured(monkeypatch, library(nvmlInit=fails) if module else None)
    assert found.samples() == () and found.trouble() is None
    found.close()


def test_a_library_that_fails_is_not_taken_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise FakeError(18)  # NVML_ERROR_LIB_RM_VERSION_MISMATCH

    found = measured(monkeypatch, library(nvmlInit=fails))
    assert found.samples() is None and "NVML can't be used" in (found.trouble() or "")
    found.close()


def test_a_failure_gives_null_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def lost(*_: Any) -> Any:
        calls[0] += 1
        raise FakeError(15)  # NVML_ERROR_GPU_IS_LOST

    found = measured(monkeypatch, library(nvmlDeviceGetPowerUsage=lost))
    (sample,) = seen(found)
    assert sample.power_w is None and sample.memory_bytes == 5
    assert "nvmlDeviceGetPowerUsage" in (found.trouble() or "")
    wait_for(lambda: calls[0] > 3, "more failures")
    assert found.trouble() is None
    found.close()


@pytest.mark.slow
def test_a_driver_that_hangs_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, released = [0], threading.Event()

    def hangs(*_: Any) -> Any:
        calls[0] += 1
        if calls[0] > 2:
            released.wait(PATIENCE_S)
        return 1000

    monkeypatch.setattr(usage, "LATE_S", 0.3)
    found = measured(monkeypatch, library(nvmlDeviceGetPowerUsage=hangs))
    wait_for(lambda: calls[0] > 2, "it to hang")
    time.sleep(0.4)
    (sample,) = seen(found)
    assert sample.memory_bytes is None and sample.used_share is None and sample.uuid == "GPU-1"
    assert "not answered" in (found.trouble() or "")
    found.close()
    assert found._thread.is_alive(), "it was not waited for"
    released.set()
