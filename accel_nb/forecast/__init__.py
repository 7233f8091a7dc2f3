"""How much memory a training will take on each rank, in each way of sharing it; and which way to take."""
