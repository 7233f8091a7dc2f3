"""Sizes, costs and device maps of models that are larger than a device."""
