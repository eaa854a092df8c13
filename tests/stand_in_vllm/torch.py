"""In torch's place, for the engine's worker on top of the stand-in of vLLM."""

from types import SimpleNamespace

__version__ = "stand-in"
cuda = SimpleNamespace(
    get_device_properties=lambda index: SimpleNamespace(total_memory=80 << 30), get_device_name=lambda index: "a GPU"
)
