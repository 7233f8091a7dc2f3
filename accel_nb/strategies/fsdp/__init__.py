"""Parameters, gradients and optimizer states sharded over ranks, by PyTorch's `fully_shard`."""
