"""Which GPUs are the agent's, and a driver that isn't there, fails or hangs. Real GPUs: tests/gpu/test_recorder_gpu.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from autorl_hpc.recorder.usage import LATE_S, Device, Gpus, chosen
from autorl_hpc.recorder.watch import Moment
from autorl_hpc.records.recorded import GpuSample

NAMES = (
    (0, "GPU-5e1a0000-aa"),
    (0, "MIG-11110000-aa"),
    (0, "MIG-22220000-aa"),
    (1, "GPU-5e1b0000-bb"),
    (2, "GPU-77770000-cc"),
)
DEVICES = [Device(index, name, None, is_slice=name.startswith("MIG")) for index, name in NAMES]


@pytest.mark.parametrize(
    ("visible", "of_job", "names"),
    [
        (None, None, ["GPU-5e1a", "GPU-5e1b", "GPU-7777"]),
        ("0,2", None, ["GPU-5e1a", "GPU-7777"]),
        ("2, 0", None, ["GPU-7777", "GPU-5e1a"]),
        ("GPU-5e1b", None, ["GPU-5e1b"]),
        ("GPU-5e1", None, []),
        ("MIG-22220000-aa,MIG-1111", None, ["MIG-2222", "MIG-1111"]),
        ("1,-1,0", None, ["GPU-5e1b"]),
        ("1,7,0", None, ["GPU-5e1b"]),
        ("", None, []),
        (None, "1", ["GPU-5e1b"]),
        (None, "4,5,6", ["GPU-5e1a", "GPU-5e1b", "GPU-7777"]),
        (None, "1-2", ["GPU-5e1b", "GPU-7777"]),
        (None, "", []),
        ("0", "2", ["GPU-5e1a"]),
        ("NoDevFiles", None, []),
    ],
)
def test_which_gpus_are_the_agents(visible: str | None, of_job: str | None, names: list[str]) -> None:
    given = {"CUDA_VISIBLE_DEVICES": visible, "SLURM_JOB_GPUS": of_job}
    found = chosen(DEVICES, {name: value for name, value in given.items() if value is not None})
    assert [device.uuid[:8] for device in found] == names


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


NOW = Moment(1.0, "2030-01-01T00:00:00.000+00:00", 1)


def measured(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None) -> Gpus:
    """Has measured once."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = Gpus({})
    found.look(NOW)
    return found


def sample_of(found: Gpus) -> GpuSample:
    (sample,) = found.samples() or ()
    return sample


def fails(value: int) -> Callable[..., Any]:
    def failing(*_: Any) -> Any:
        raise FakeError(value)

    return failing


def test_use_is_the_mean_since_the_last_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]

    def samples(handle: int, kind: int, since_us: int) -> tuple[int, list[SimpleNamespace]]:
        clock[0] += 100
        values = (100, 0) if clock[0] > 100 else (7, 50)
        return 1, [
            SimpleNamespace(timeStamp=clock[0] + n, sampleValue=SimpleNamespace(uiVal=v)) for n, v in enumerate(values)
        ]

    found = measured(monkeypatch, library(nvmlDeviceGetSamples=samples))
    assert sample_of(found).used_share == 0.5, "of what was before, the last period"
    for _ in range(2):
        found.look(NOW)
    assert sample_of(found).used_share == 0.5


def test_no_gpu_is_an_empty_tuple_a_library_that_fails_is_told_once_and_a_figure_that_fails_is_null(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (None, library(nvmlInit=fails(9)), library(nvmlInit=fails(12))):
        found = measured(monkeypatch, module)
        found.look(NOW)
        assert found.samples() == ()
        found.close(NOW)
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlInit=fails(18)))  # LIB_RM_VERSION_MISMATCH
    found = Gpus({})
    with pytest.raises(RuntimeError, match="NVML can't be used"):
        found.look(NOW)
    found.look(NOW)
    assert found.samples() is None
    sample = sample_of(measured(monkeypatch, library(nvmlDeviceGetPowerUsage=fails(15))))  # GPU_IS_LOST
    assert sample.power_w is None and sample.memory_bytes == 5


def test_a_slice_has_memory_and_no_use_or_power(monkeypatch: pytest.MonkeyPatch) -> None:
    module = library(
        nvmlDeviceGetMigMode=lambda handle: (1, 1),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 1,
        nvmlDeviceGetMigDeviceHandleByIndex=lambda handle, number: 7,
        nvmlDeviceGetUUID=lambda handle: "MIG-7" if handle == 7 else "GPU-1",
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = Gpus({"CUDA_VISIBLE_DEVICES": "MIG-7"})
    found.look(NOW)
    sample = sample_of(found)
    assert (sample.uuid, sample.memory_bytes, sample.used_share, sample.power_w) == ("MIG-7", 5, None, None)


def test_a_driver_that_hangs_gives_nulls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setitem(sys.modules, "pynvml", library())
    found = Gpus({}, lambda: now[0])
    found.look(NOW)
    now[0] += LATE_S + 1
    assert sample_of(found) == GpuSample(index=0, name="Fake", uuid="GPU-1")
