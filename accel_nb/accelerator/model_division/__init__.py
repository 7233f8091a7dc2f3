"""Division of a model's calls among ranks: each rank computes some rows of a batch that all ranks have.

`divided_calls` divides a call. The other modules decide whether the result is right, and keep it equal to that on one
device:

- Which dims hold rows: `row_layout`, by calls with a few rows; `near_zero_values`, `forward_only`.
- When a layout holds: `calls_by_state`, `model_structure`, `plain_state`, `reachable_state`.
- Code that rules division out: `argument_changes`, `backward_code`, `call_observers`, `module_state`, `tensor_writes`,
  `value_reads`, `read_comparison`, `random_reads`.
- Equal results: `row_random`, `random_generators`, `batch_norm`, `related_outputs`, `overlapping_outputs`.
- torch.compile: `uncompiled_code`.
"""
