"""Checkpoints: complete or absent, written by all ranks, verified before they are read, on any world size."""
