"""The world, its process group and its collectives."""
