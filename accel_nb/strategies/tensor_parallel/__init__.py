"""Tensor parallelism: layers of a model that several ranks compute together."""
