"""One script per question; each compares accel_nb with the alternatives of a user. `python -m benchmarks` runs all."""
