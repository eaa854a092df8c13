"""The figures of one GPU: `benchmarks/bench gpu-...`; see `cli`."""
