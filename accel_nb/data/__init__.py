"""Data loading: samplers, division of batches among ranks, prefetch, and positions for resumption."""
