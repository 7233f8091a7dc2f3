"""The engine for this machine: a zygote process, workers forked from it, and their channels."""
