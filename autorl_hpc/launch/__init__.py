"""Experiment -> runs -> jobs."""
