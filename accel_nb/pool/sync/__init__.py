"""Synchronization of the names of a notebook between the kernel and its workers.

Either side detects which objects have changed since both held the same, and sends these changes as one pickle stream.
The other side changes its own objects in place, so that references to them stay valid.

- What the other side holds: `shared_object_registry` (in the kernel), `namespace_snapshot` (on a worker),
  `references`, `imported_attributes`.
- What has changed: `change_detection`, `object_kinds`, `object_paths`, `long_containers`.
- What is sent: `namespace_sync` (with a cell), `result_transfer` (after it).
- What a user is told of results: `items_before`, `replaced_objects`, `function_caches`.
- Identity: `shared_ids`, `shared_memory`, `memory_blocks`.
- The stream: `pickling`, `pickler`, `sections`.

The other modules have one kind of object each: a check, a reduction for the stream, and where it is changed in place
its content.

- Models, optimizers, loaders: `module_gradients`, `module_hooks`, `module_parts`, `parametrized`, `optimizer_states`,
  `optimizer_reduction`, `loader_state`, `user_attributes`, `user_hooks`.
- Tensors and memory: `tensor_reduction`, `foreign_graphs`, `memory_maps`, `memory_views`.
- Classes and functions: `cell_classes`, `class_attributes`, `class_bodies`, `patched_classes`, `function_reduction`,
  `custom_operators`.
- Others: `event_writers`, `hdf5_objects`, `iterators`, `locks`, `module_constants`, `object_reduction`,
  `object_states`, `open_files`, `process_objects`, `weak_collections`, `widgets`.
"""
