"""Scorers shared by tasks, judges, and the statistics of one score."""
