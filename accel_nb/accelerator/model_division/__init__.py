"""Division of a model's calls among ranks: each rank computes some rows of a batch that all ranks have."""
