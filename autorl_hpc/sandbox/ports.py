"""TCP ports that an agent at level landlock may go to at any address: Landlock's rules name ports, and trainings need these."""

from __future__ import annotations

from pathlib import Path

TORCH_PORTS = range(29500, 29564)
"""Where torch's launchers listen by default."""


def handed_out() -> range:
    """The ports that the kernel gives to whoever asks for any: NCCL and gloo do, even for one process."""
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return range(int(first), int(last) + 1)
    except (OSError, ValueError):
        return range(32768, 61000)
