"""Synchronization of the names of a notebook between the kernel and its workers."""
