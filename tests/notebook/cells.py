"""Accelerated cells of a test's kernel."""

from __future__ import annotations


def run(kernel, body: str, flags: str = "--cpus 2", **options):
    return kernel.run(f"%%accelerate {flags}\n{body}", **options)


def done(kernel, body: str, flags: str = "--cpus 2"):
    output = run(kernel, body, flags)
    assert output.error is None, output.traceback
    return output


def setup(kernel, code: str) -> None:
    output = kernel.run(code)
    assert output.error is None, output.traceback


STATE = "get_ipython().magics_manager.registry['AccelerateMagics'].session.last_run.output.panel_state"
