"""One script per question, each side by side with what a user would pick instead; `python -m benchmarks` runs all."""
