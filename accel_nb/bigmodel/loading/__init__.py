"""Loading weights from safetensors files into models."""
