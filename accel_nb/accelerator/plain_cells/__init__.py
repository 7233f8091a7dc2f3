"""Plain PyTorch cells: automatic preparation, and the checks that a cell trains as on one device.

`autoprepare` runs a cell. While the cell runs it replaces functions of torch, Python and libraries by those that the
other modules make:

- Objects to prepare: `object_graph`, `training_detection`, `lazy_models`, `new_parts`, `external_division`,
  `unmanaged_tensors`.
- Division of batches: `loop_division`; for shares the check of losses: `loss_proof`, `loss_trace`, `sample_rules`,
  `contrastive_check`, `module_calls`, `model_hooks`.
- Backward passes and gradients: `backward_passes`, `clipping`, `gradient_data`, `held_gradients`, `sharded_code`.
- Devices, random numbers, compilers: `device_moves`, `fresh_seeds`, `torchscript`.
- Files and commands, which rank 0 writes and runs for all ranks: `cell_files`, `file_writes`, `shared_files`,
  `changed_paths`, `library_files`, `shared_commands`.
- Replacement itself: `imported_names`, `late_imports`.
- Messages: `cell_warnings`.
"""
