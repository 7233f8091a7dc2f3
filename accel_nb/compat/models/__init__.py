"""Models with accelerate's names: hooks, device maps, offloading, files of weights."""
