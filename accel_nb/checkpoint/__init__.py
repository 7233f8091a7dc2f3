"""Checkpoints: atomic, written by all ranks, verified before they are read, independent of the world size."""
