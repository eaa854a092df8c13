"""Merges ledgers into reports. Reads what graders and supervisors wrote; imports neither of them, no torch, no GPU."""
