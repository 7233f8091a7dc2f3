"""The process and its environment: variables, hardware, world, devices, process group, random numbers."""
