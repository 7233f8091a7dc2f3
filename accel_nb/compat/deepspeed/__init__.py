"""DeepSpeed with accelerate's names: plugin, configuration, engine."""
