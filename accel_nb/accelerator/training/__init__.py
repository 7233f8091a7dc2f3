"""Training steps: accumulation, loss weights, optimizers, learning rates and control of a run."""
