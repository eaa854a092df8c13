"""Staging on the login node: fetch, verify and pin models, task data and environments."""
