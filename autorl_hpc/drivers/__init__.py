"""The job of a driver that is served here: `vllm serve`, found by an endpoint file, watched, and started over."""
