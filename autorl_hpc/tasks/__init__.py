"""Finds, loads and checks task folders; built-in tasks use the same loader as users' tasks."""
