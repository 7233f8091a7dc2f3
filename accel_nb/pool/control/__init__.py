"""Stopping requests, detecting hangs, and running actions after the same step on every rank."""
