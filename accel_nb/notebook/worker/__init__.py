"""The part of the notebook that runs in worker processes."""
