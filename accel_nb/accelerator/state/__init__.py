"""The state of a training run: saving, matching and restoring it."""
