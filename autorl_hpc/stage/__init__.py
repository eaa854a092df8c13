"""Brings models and task data in on the login node, verifies and pins them."""
