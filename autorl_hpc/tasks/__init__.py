"""Finds and loads task folders; built-in ones by the same loader as users'."""
