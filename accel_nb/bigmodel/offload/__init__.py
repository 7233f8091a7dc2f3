"""Offloading: weights in host memory or on disk, copied to a device for each forward."""
