"""The process and its machine: environment variables, hardware, random numbers, serialization."""
