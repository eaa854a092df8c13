"""Measures a cluster and this host by doing, and says of each thing what follows from it and what to do."""
