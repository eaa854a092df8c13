"""The shared file system: atomic writes, tolerant reads, listing, layout, ledger, queue and claims."""
