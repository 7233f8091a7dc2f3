"""Weights that are kept in host memory or on disk and moved to a device when they are needed."""
