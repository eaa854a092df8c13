"""Engines, environments and the episode scheduler, for graders and for agents that train. Holds no held-out data. Agents get a
copy of this package, so at run time it imports nothing from the rest of the suite."""
