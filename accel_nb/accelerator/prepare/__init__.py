"""Preparation of models, optimizers, schedulers and loaders."""
