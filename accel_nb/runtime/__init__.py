"""The process and its surroundings: environment, hardware, world, devices, process group, random numbers."""
