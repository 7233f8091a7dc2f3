"""Functions for the process and its world: usable without an `Accelerator`."""
