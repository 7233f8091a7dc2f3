"""Models larger than a device: planning, loading, offloading, quantization and pipelining."""
