"""Experts of a mixture-of-experts model that are divided among ranks."""
