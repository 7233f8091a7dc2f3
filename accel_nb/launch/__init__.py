"""Scripts, modules and notebooks as jobs: on this machine, on several, and under schedulers. Imports without torch."""
