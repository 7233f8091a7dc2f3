"""Structures of tensors: nested, sharded, shared and overlapping."""
