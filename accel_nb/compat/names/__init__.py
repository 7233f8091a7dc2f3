"""The names of accelerate that can be imported, and the finder that serves them."""
