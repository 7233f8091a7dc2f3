"""Persistent worker processes behind an engine interface of six methods."""
