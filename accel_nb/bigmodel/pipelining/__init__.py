"""Models cut into stages that compute micro-batches at the same time."""
