"""Loaders, samplers and nested data with accelerate's names."""
