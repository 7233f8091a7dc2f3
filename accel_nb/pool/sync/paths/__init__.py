"""Paths to the objects that a value refers to, and what is at them."""
