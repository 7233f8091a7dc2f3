"""Pipelining of micro-batches over devices in one process, or over ranks."""
