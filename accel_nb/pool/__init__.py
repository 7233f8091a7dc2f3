"""Persistent worker processes behind the interface of an engine."""
