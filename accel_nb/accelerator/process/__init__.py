"""The process and its world, for scripts that use functions without an accelerator."""
