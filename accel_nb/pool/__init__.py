"""Persistent worker processes behind a six-call engine seam."""
