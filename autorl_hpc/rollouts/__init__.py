"""The engine Protocol (and, with interactive tasks, environments and the episode scheduler). Holds no held-out data."""
