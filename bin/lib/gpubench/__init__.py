"""The figures of one GPU: `bin/bench gpu-...`; see `cli`."""
