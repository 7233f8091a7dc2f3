"""Replacements of functions of torch and of libraries while a plain cell runs."""
