"""The page of `mm report`: one HTML file that opens without a network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files

from mm_core.errors import MMError
from mm_core.report import clips, curves
from mm_core.report.reading import Run
from mm_core.schema.nodes import leaves

_ELSEWHERE = ("config", "plan", "plugins", "forecast")
_SHOWN_ELSEWHERE = re.compile(r"samples|(loss|grad_norm|timesteps)_by_.*|time/.*|.*/rows")


def render(runs: Sequence[Run], media_bytes: int) -> str:
    """The report page of runs as HTML text.

    Args:
        runs: the runs; several are compared.
        media_bytes: most bytes for all sampled clips, as base64 text.
    """
    left, documents = media_bytes, []
    for place, run in enumerate(runs):
        shots, used = clips.embed(run, left // (len(runs) - place))
        left -= used
        documents.append({**describe(run), "shots": shots})
    data = {"runs": documents, "prompts": clips.prompts(runs), "config_diff": differing(runs)}
    return _page(", ".join(run.label for run in runs), data)


def describe(run: Run) -> dict[str, object]:
    """The data of one run for the report page, except its clips."""
    names = [name for name in run.series if not _SHOWN_ELSEWHERE.fullmatch(name)]
    scale = run.density.name if run.density is not None else _scale(run)
    return {
        "label": run.label,
        "folder": str(run.folder),
        "summary": summary(run),
        "remarks": run.remarks,
        "axis": curves.axis(run),
        "curves": {name: curves.curve(run.series[name]) for name in names},
        "scale": scale,
        "loss_by": curves.heat_map(run, f"loss_by_{scale}"),
        "grad_norm_by": curves.heat_map(run, f"grad_norm_by_{scale}"),
        "density": curves.density(run, run.density),
        "time": curves.time_split(run),
        "environment": environment(run),
        "config": dict(flatten(run.manifest.get("config", {}))),
        "config_text": run.config_text,
    }


def _scale(run: Run) -> str | None:
    """The scale of the loss bins, taken from the names of the metrics."""
    found = (n.removeprefix("loss_by_").partition("/")[0] for n in run.series if n.startswith("loss_by_"))
    return next(found, None)


def summary(run: Run) -> list[tuple[str, str]]:
    """One run's row in the report's table of runs: pairs of column and value."""
    planned, last = run.planned_steps, run.last_step
    if planned is None:
        state = "unknown length"
    else:
        state = "complete" if last >= planned else "incomplete: still training, stopped or failed"
    rows = [
        ("state", state),
        ("steps", f"{last:,}" + (f" of {planned:,}" if planned is not None else "")),
        ("last written", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.written))),
    ]
    for name in ("loss", "validation/loss", "validation_ema/loss", "test/loss", "test_ema/loss"):
        series = run.series.get(name)
        if series is None:
            continue
        finite = [(v, s) for s, v in zip(series.steps, series.values, strict=True) if v - v == 0]
        rows.append((f"last {name}", f"{series.values[-1]:.5g}"))
        if name.startswith("validation") and finite:
            best, step = min(finite)
            rows.append((f"lowest {name}", f"{best:.5g} at step {step:,}"))
    speed = run.series.get("samples_per_second")
    if speed is not None:
        rows.append(("samples per second, median", f"{_median(speed.values):.4g}"))
    if (memory := run.series.get("memory")) is not None:
        rows.append(("peak memory per rank", f"{max(memory.values) / 2**30:.3g} GiB"))
    return [*rows, *_foreseen(run)]


def _foreseen(run: Run) -> Iterator[tuple[str, str]]:
    """What the forecast of a run was, beside what was measured."""
    forecast = run.manifest.get("forecast")
    if not isinstance(forecast, dict):
        return
    memory, devices = forecast.get("peak_of_tensors"), run.manifest.get("devices")
    if isinstance(memory, int) and memory:
        apart = " of tensors; measured is the whole process"
        on_cpu = isinstance(devices, dict) and devices.get("device") == "cpu"
        yield "peak memory per rank, forecast", f"{memory / 2**30:.3g} GiB{apart * on_cpu}"
    seconds, measured = forecast.get("step_seconds"), run.series.get("step_time")
    if isinstance(seconds, float) and seconds and measured is not None:
        yield "seconds a step, median", f"{_median(measured.values):.4g}"
        yield "seconds a step, forecast", f"{seconds:.4g}"


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def environment(run: Run) -> dict[str, str]:
    """The facts of a run's manifest for the report, without the config and without lists of modules."""
    rest = {key: value for key, value in run.manifest.items() if key not in _ELSEWHERE}
    plan = run.manifest.get("plan")
    if isinstance(plan, dict):
        sizes = ("global_batch_size", "micro_batch_size", "accumulation", "steps")
        rest["plan"] = {key: plan[key] for key in sizes if key in plan}
        rest["modules"] = {
            str(module.get("name")): module.get("parameters")
            for module in plan.get("modules") or ()
            if isinstance(module, dict)
        }
    plugins = run.manifest.get("plugins")
    rest["plugins"] = {
        str(row.get("distribution")): row.get("version")
        for row in (plugins if isinstance(plugins, list) else ())
        if isinstance(row, dict)
    }
    return dict(flatten(rest))


def differing(runs: Sequence[Run]) -> list[str]:
    """The config keys whose values differ between the runs of a report that have a manifest."""
    configs = [dict(flatten(run.manifest["config"])) for run in runs if "config" in run.manifest]
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({config.get(key) for config in configs}) > 1]


def flatten(value: object) -> Iterator[tuple[str, str]]:
    """The dotted keys of a run's config or manifest with their values as text, for the report's tables."""
    for key, leaf in leaves(value):
        if key and leaf != {}:
            yield key, leaf if isinstance(leaf, str) else json.dumps(leaf, ensure_ascii=False)


def _page(title: str, data: Mapping[str, object]) -> str:
    script = "\n".join([_asset("charts.js"), _asset("page.js")])
    body = f"""
<noscript>This page draws its charts with a script that it contains: enable scripts to see them.</noscript>
<main id="page"></main>
<script type="application/json" id="data">{to_json(data)}</script>
<script>{script}</script>
"""
    return document(f"{title}: mm report", body, script)


def document(title: str, body: str, script: str | None = None) -> str:
    """An HTML document in the style of the report page. It loads nothing.

    Args:
        title: text.
        body: HTML.
        script: the only script of the body that runs.
    """
    style = _asset("page.css")
    # Markup in a prompt is shown as text.
    policy = (
        "default-src 'none'; img-src data:; media-src data:; "
        f"style-src '{_digest(style)}'; script-src '{_digest(script) if script is not None else 'none'}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>{style}</style></head><body>{body}</body></html>
"""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], marked: Container[int] = ()) -> str:
    """An HTML table of texts, which can be scrolled in a narrow window.

    Args:
        heads: of the columns.
        rows: cells.
        marked: numbers of the rows that are red.
    """

    def line(cells: Sequence[str], tag: str, number: int = -1) -> str:
        red = ' class="remark"' * (number in marked)
        return f"<tr{red}>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line(cells, "td", number) for number, cells in enumerate(rows))
    head = f"<thead>{line(heads, 'th')}</thead>" if heads else ""
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def to_json(data: Mapping[str, object]) -> str:
    """The report's data as JSON for an HTML page: no text in it can end the script or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot be encoded


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"


def _asset(name: str) -> str:
    try:
        return files("mm_core.report").joinpath(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MMError(
            f"the file {name} of the report page is not installed",
            hint="reinstall mm-core: its wheel contains the file",
        ) from None
