"""Replicas of a model with averaged gradients, by PyTorch's DistributedDataParallel."""
