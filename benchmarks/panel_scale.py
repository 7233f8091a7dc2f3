"""Does the panel keep up with long runs, in the kernel and in the browser?

A real kernel processes a run of two ranks and a million steps, streams a fast run live, and shows an ended run again.
The package's widget draws in headless Chromium without JupyterLab: a page sends it messages as Jupyter does.
"""

from __future__ import annotations

import base64
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from benchmarks.measure import ROOT, Figure, Report, main, quantile, running_kernel
from tests.ui.lab import BROWSER_FLAGS, find_browser

BUNDLE = ROOT / "accel_nb" / "ui" / "static" / "widget.js"
POINTS = 1_000_000
UPDATES_PER_S = 20
ROWS_PER_UPDATE = 50
STEPS_PER_S = 1000

_KERNEL = """
import gc, json, math, time
from pathlib import Path
import psutil
from accel_nb.telemetry.events import MemorySample, StepDone
from accel_nb.ui.panel import Panel
from accel_nb.ui import widget
widget.PanelWidget().close()
_sent, _original = [], widget.PanelWidget.send
def _send(self, content, buffers=None):
    size = len(json.dumps(content)) + sum(len(part) for part in buffers or [])
    _sent[:] = [*(row[:2] + (None, None) for row in _sent), (time.perf_counter(), size, content, buffers)]
    _original(self, content, buffers)
widget.PanelWidget.send = _send
def _events(first, last):
    for step in range(first, last):
        now = 1.7e9 + step * 0.01
        for rank in (0, 1):
            loss = 0.1 + 2.3 * math.exp(-step / 2e5) * (1 + 0.3 * math.sin(step * 1.7 + rank))
            yield StepDone(rank, step, now, loss, 1e-3, 0.01, 32)
            if step % 100 == 0:
                yield MemorySample(rank, step, now, 2**26, 2**26, 2**27, 2**20, 2**22, 2**34)
def _stream(seconds, steps_per_s):
    panel = Panel("fast", 2, display="widget")
    _sent.clear()
    started, step = time.perf_counter(), 1
    while (passed := time.perf_counter() - started) < seconds:
        upto = 1 + int(passed * steps_per_s)
        panel.feed(list(_events(step, upto)))
        step = upto
        panel.refresh()
        time.sleep(0.02)  # the kernel's loop waits for its workers
    size = sum(row[1] for row in _sent)
    panel.finish("interrupted")
    return [size, seconds, len(_sent)]
def _long(steps):
    global _panel
    gc.collect()
    before = psutil.Process().memory_info().rss
    _panel = Panel("long", 2, display="widget")
    started = time.perf_counter()
    for first in range(1, steps + 1, 5000):
        _panel.feed(list(_events(first, min(steps + 1, first + 5000))))
    took = time.perf_counter() - started
    gc.collect()
    return [psutil.Process().memory_info().rss - before, took / steps / 2]
def _attach(folder):
    _sent.clear()
    started = time.perf_counter()
    _panel.attach()
    at, _, content, buffers = _sent[-1]
    Path(folder, "message.json").write_text(json.dumps(content))
    Path(folder, "message.bin").write_bytes(buffers[0])
    return at - started
"""

_PAGE = """
async code => {
  const url = URL.createObjectURL(new Blob([code], { type: 'text/javascript' }));
  const define = (await import(url)).default;
  const frame = () => new Promise(resolve => requestAnimationFrame(resolve));
  let seq = 0;
  window.message = (told, kind, first, rows) => {
    const values = new Float64Array(6 * rows);
    for (let row = 0; row < rows; row += 1) {
      const step = first + row;
      const noise = 1 + 0.3 * Math.sin(step * 1.7);
      const line = [step, 0.1 + 2.3 * Math.exp(-step / 2e5) * noise, 0.001, 10, 32 * step, step / 100];
      line.forEach((value, column) => { values[column * rows + row] = value; });
    }
    const blocks = [{ table: 'step', rank: 0, name: '', rows }];
    const facts = { ...told.facts, status: 'running', step: first + rows };
    const content = { ...told, kind, base: seq, seq: seq + 1, blocks, marks: [], facts };
    seq += 1;
    return [content, [new DataView(values.buffer)]];
  };
  window.open_ = () => {
    const listeners = {};
    const model = {
      get: name => (name === 'final' ? {} : null),
      on: (name, listener) => { listeners[name] = listener; },
      off: () => undefined,
      send: () => undefined
    };
    const el = document.createElement('div');
    document.body.replaceChildren(el);
    const widget = define();
    const signal = new AbortController().signal;
    widget.initialize({ model, signal });
    widget.render({ model, el, signal });
    return (content, buffers) => listeners['msg:custom'](content, buffers);
  };
  window.drawn = async () => {
    const deadline = performance.now() + 20000;
    while (!document.querySelector('.accel-nb-section canvas')) {
      if (await frame() > deadline) { throw new Error('the widget draws nothing'); }
    }
    await frame();  // what was drawn in the frame before is on the screen
  };
  window.frames = async (told, points, rows, everyMs, seconds) => {
    const take = window.open_();
    take(...window.message(told, 'snapshot', 1, points));
    await window.drawn();
    for (let count = 0; count < 30; count += 1) { await frame(); }
    const times = [];
    let updates = 0;
    const timer = setInterval(() => {
      take(...window.message(told, 'delta', points + 1 + rows * updates, rows));
      updates += 1;
    }, everyMs);
    let last = await frame();
    const end = last + 1000 * seconds;
    while (last < end) {
      const now = await frame();
      times.push(now - last);
      last = now;
    }
    clearInterval(timer);
    const shown = Number(document.querySelector('.accel-nb-panel').dataset.points);
    return { times, updates, isWhole: shown === points + rows * updates };
  };
  window.reopen = async (content, bytes) => {
    const buffer = Uint8Array.from(atob(bytes), char => char.charCodeAt(0));
    await frame();
    const started = performance.now();
    const take = window.open_();
    take(content, [new DataView(buffer.buffer)]);
    await window.drawn();
    return performance.now() - started;
  };
}
"""


def panel_scale(quick: bool = False) -> Report:
    """Measure long and fast runs in the kernel, on the wire and in the browser."""
    points, seconds, rounds = (100_000, 3, 3) if quick else (POINTS, 8, 7)
    report = Report(
        "Panel at scale",
        f"A run of two ranks and {points:,} steps; a chart of {points:,} points with {UPDATES_PER_S} updates a second.",
        ["", "median", "p95", "largest"],
    )
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, running_kernel() as kernel:
        kernel.run(_KERNEL)
        kernel.run("_stream(1, 10)")  # imports
        size, took, num_sent = kernel.run(f"_told = _stream({seconds}, {STEPS_PER_S})", "_told")
        held, fold_s = kernel.run(f"_told = _long({points})", "_told", timeout_s=600)
        kernel.run("_panel.finish('done')")
        attach_ms = [kernel.run(f"_took = _attach({folder!r})", "_took") * 1000 for _ in range(rounds)]
        content = json.loads(Path(folder, "message.json").read_text())
        sent = base64.b64encode(Path(folder, "message.bin").read_bytes()).decode()
    with _page() as page:
        found = page.evaluate(
            "([told, points, rows, ms, seconds]) => frames(told, points, rows, ms, seconds)",
            [content, points, ROWS_PER_UPDATE, 1000 / UPDATES_PER_S, seconds],
        )
        draw_ms = [
            page.evaluate("([content, bytes]) => reopen(content, bytes)", [content, sent]) for _ in range(rounds)
        ]
    if not found["isWhole"]:
        raise RuntimeError("the widget has not received all rows: its frame times are not valid")
    sample_us, count_s, num_tensors = _memory_sampling(quick)
    frames: list[float] = found["times"]
    for name, values in {
        "frame, ms": frames,
        "kernel: from attach to the first message, ms": attach_ms,
        "browser: from the first message to the picture, ms": draw_ms,
    }.items():
        report.add(name, statistics.median(values), quantile(values, 0.95), max(values))
    report.figures += [
        Figure("frame, mean", statistics.mean(frames), 20, "ms"),
        Figure("frame, p95", quantile(frames, 0.95), 33, "ms"),
        Figure("reopening, to the first picture", statistics.median(attach_ms) + statistics.median(draw_ms), 300, "ms"),
        Figure(f"live traffic at {STEPS_PER_S:,} steps/s", size / took / 1000, 64, "KB/s"),
        Figure("kernel memory of the run", held / 1e6, 100, "MB"),
        Figure(f"memory sampling, {num_tensors:,} tensors", sample_us / 1e4 * 5, 1, "%"),
        Figure("widget bundle", BUNDLE.stat().st_size / 1000, 150, "kB"),
    ]
    report.notes += [
        f"{found['updates'] / seconds:.1f} updates a second arrived in the browser, of {ROWS_PER_UPDATE} steps each; "
        f"the kernel sent {num_sent / took:.1f} messages a second.",
        f"Folding a step costs the kernel {fold_s * 1e6:.1f} us a rank.",
        f"A sample of memory takes {sample_us:.0f} us, five times a second; counting {num_tensors:,} tensors anew, "
        f"when models, optimizers or their state were added, {count_s * 1e3:.0f} ms.",
    ]
    return report


@contextmanager
def _page() -> Iterator[Page]:
    """Open a page with the widget's code in headless Chromium."""
    path = find_browser()
    if path is None:
        raise RuntimeError("no Chromium: run `make setup`, or point CHROMIUM_PATH at one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.evaluate(_PAGE, BUNDLE.read_text(encoding="utf-8"))
        try:
            yield page
        finally:
            browser.close()


def _memory_sampling(quick: bool) -> tuple[float, float, int]:
    """Return a sample's time in us, the time in s of one that counts tensors again, and the number of tensors."""
    import torch

    from accel_nb.telemetry.events import Event
    from accel_nb.telemetry.memory import MemoryMeter

    class Sink:
        def emit(self, event: Event) -> None:
            """Do nothing."""

    number = 2500 if quick else 25_000
    model = torch.nn.Module()
    model.values = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(4)) for _ in range(number))
    optimizer: Any = torch.optim.Adam(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros(4)
        optimizer.state[parameter] = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    meter = MemoryMeter(0, "cpu", Sink())
    times: list[float] = []
    for step in range(200):
        started = time.perf_counter()
        meter.sample(started, step, [model], [optimizer], (0, 0) if step < 100 else (0, 8))
        times.append(time.perf_counter() - started)
    assert meter.bytes_by_kind == {"parameters": number * 16, "gradients": number * 16, "optimizer": number * 32 + 8}
    return statistics.median(times) * 1e6, times[100], 4 * number


if __name__ == "__main__":
    main(panel_scale)
