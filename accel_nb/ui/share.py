"""A run as one self-contained HTML file: the interactive panel, options, environment, and every row as CSV."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from typing import Any

from accel_nb.runtime.process.secrets import redact
from accel_nb.ui.csv_export import new_file, to_csv
from accel_nb.ui.view import PanelState
from accel_nb.ui.widget import BUNDLE

SHARED_POINTS = 20_000
"""Maximum number of rows of each table in the chart; the CSV has all rows."""


def save_html(state: PanelState, message: Mapping[str, Any], buffer: bytes, folder: str = ".") -> str:
    """Write the file into a folder, under a new name, and return the name.

    ``message`` and ``buffer`` are a snapshot in the format that is sent to a browser.
    """
    return new_file(to_html(state, message, buffer), state.title, "html", folder)


def to_html(state: PanelState, message: Mapping[str, Any], buffer: bytes) -> str:
    """Return the text of the file. Secrets in options and environment are hidden."""
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(redact(text))}</td></tr>"
        for name, text in state.describe().items()
    )
    data = {"message": {**message, "facts": {**message["facts"], "accepts_actions": False, "num_earlier": 0}}}
    data |= {"buffer": base64.b64encode(buffer).decode(), "csv": to_csv(state)}
    return _PAGE.format(
        title=html.escape(state.title),
        rows=rows,
        data=_in_script(json.dumps(data, allow_nan=False)),
        code=_in_script(json.dumps(BUNDLE.read_text(encoding="utf-8"))),
    )


def _in_script(text: str) -> str:
    """Return JSON without characters that could end a script element."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ margin: 0 auto; padding: 24px; max-width: 1400px; font: 14px/1.5 system-ui, sans-serif; }}
h1 {{ margin: 0 0 12px; font-size: 20px; font-weight: 600; }}
table {{ margin-top: 20px; border-collapse: collapse; }}
th, td {{ padding: 3px 16px 3px 0; font-weight: 400; text-align: left; vertical-align: top; }}
th {{ opacity: 0.7; }}
td {{ font-family: ui-monospace, monospace; font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; }}
button[title^='Save the run as one HTML file'] {{ display: none; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #1e1e1e; color: #e6e6e6; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
<div id="panel"></div>
<table>{rows}</table>
<script type="application/json" id="data">{data}</script>
<script type="application/json" id="code">{code}</script>
<script type="module">
const read = id => JSON.parse(document.getElementById(id).textContent);
const data = read('data');
const bytes = Uint8Array.from(atob(data.buffer), char => char.charCodeAt(0));
const traits = {{ final: data.message, snapshot: new DataView(bytes.buffer) }};
const handlers = {{}};
const model = {{
  get: name => traits[name],
  on: (name, handler) => (handlers[name] ??= []).push(handler),
  off: () => undefined,
  send: query => {{
    if (query.kind === 'csv') {{
      const answer = {{ kind: 'csv', version: query.version, blocks: [], text: data.csv, file: null }};
      handlers['msg:custom'].forEach(handler => handler(answer, []));
    }}
  }}
}};
const address = URL.createObjectURL(new Blob([read('code')], {{ type: 'text/javascript' }}));
const widget = (await import(address)).default();
const signal = new AbortController().signal;
widget.initialize({{ model, signal }});
widget.render({{ model, el: document.getElementById('panel'), signal }});
</script>
</body>
</html>
"""
