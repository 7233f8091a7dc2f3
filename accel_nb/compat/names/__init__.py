"""The names of accelerate that can be imported, and the import finder that provides them."""
