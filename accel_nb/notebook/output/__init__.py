"""The output of a running cell."""
