"""Linear layers with quantized weights, and their files."""
