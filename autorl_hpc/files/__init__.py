"""What touches the shared file system: atomic writes, tolerant reads, listing, layout, ledger, claims."""
