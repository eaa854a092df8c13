"""Engines, environments and the episode scheduler, for graders and for agents that train. Holds no held-out data.

Nothing in this room imports the rest of the suite at run time: agents get a copy of it.
"""
