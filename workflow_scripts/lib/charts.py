"""The charts of a study, specified with Altair and saved as SVG without a browser."""

import io
from collections.abc import Sequence
from pathlib import Path

import altair as alt
import polars as pl

from workflow_scripts.lib.jsonl import atomic_writer

# Okabe and Ito's colours, told apart by colour-blind readers (jfly.uni-koeln.de/color).
COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"]
INK = "#6b7280"  # readable on white and on black
PANEL_WIDTH, PANEL_HEIGHT, PANELS_PER_ROW = 300, 200, 3


def save_svg(chart: alt.TopLevelMixin, path: str | Path) -> None:
    """Draw a chart into an SVG file with a transparent ground."""
    drawn = io.StringIO()
    chart.save(drawn, format="svg")
    with atomic_writer(path) as file:
        file.write(drawn.getvalue())


def loss_chart(steps: pl.DataFrame) -> alt.TopLevelMixin:
    """Training loss by step, one line a run, one panel a model and context.

    `steps` has columns panel, backend, variant, step, loss; the thick line is a running mean.
    """
    if steps.is_empty():
        return _nothing("No run has logged a step yet.")
    window = max(1, int(steps["step"].max()) // 20)
    smooth = steps.sort("panel", "backend", "variant", "step").with_columns(
        pl.col("loss")
        .rolling_mean(window, min_samples=1)
        .over("panel", "backend", "variant")
        .alias("mean")
    )
    base = alt.Chart(smooth).encode(
        x=alt.X("step:Q", title="optimizer step"),
        color=_backend_color(smooth),
        detail="variant:N",
    )
    scale = alt.Scale(zero=False)
    raw = base.mark_line(opacity=0.25, strokeWidth=1).encode(
        y=alt.Y("loss:Q", title="training loss", scale=scale)
    )
    mean = base.mark_line(strokeWidth=2).encode(y=alt.Y("mean:Q", scale=scale))
    panels = alt.layer(raw, mean).properties(width=PANEL_WIDTH, height=PANEL_HEIGHT)
    return themed(panels.facet(alt.Facet("panel:N", title=None), columns=PANELS_PER_ROW))


def bar_chart(table: pl.DataFrame, field: str, title: str, factor: float = 1) -> alt.TopLevelMixin:
    """One bar a run for a field of its row, one panel a model and context."""
    bars = with_panels(table).select(
        "panel",
        "backend",
        pl.concat_str("backend", pl.lit(" "), "variant").alias("run")
        if table["variant"].n_unique() > 1
        else pl.col("backend").alias("run"),
        (pl.col(field).cast(pl.Float64, strict=False) * factor).alias("value"),
    )
    bars = bars.drop_nulls("value")
    if bars.is_empty():
        return _nothing(f"No run has a figure for: {title}.")
    base = alt.Chart(bars).encode(y=alt.Y("run:N", title=None))
    bar = base.mark_bar().encode(
        x=alt.X("value:Q", title=title), color=_backend_color(bars, legend=None)
    )
    text = base.mark_text(align="left", dx=4, color=INK).encode(
        x="value:Q", text=alt.Text("value:Q", format=",.3s")
    )
    panels = alt.layer(bar, text).properties(width=PANEL_WIDTH)
    return themed(
        panels.facet(alt.Facet("panel:N", title=None), columns=PANELS_PER_ROW).resolve_scale(
            y="independent"
        )
    )


def run_chart(title: str, steps: pl.DataFrame) -> alt.TopLevelMixin:
    """One run: its training loss, and the seconds of each step, by step."""
    if steps.is_empty():
        return _nothing(f"{title}: no steps.")
    base = alt.Chart(steps).encode(x=alt.X("step:Q", title="optimizer step"))
    size = {"width": 2 * PANEL_WIDTH}
    loss = base.mark_line(color=COLORS[0]).encode(
        y=alt.Y("loss:Q", title="training loss", scale=alt.Scale(zero=False))
    )
    seconds = base.mark_circle(color=COLORS[1]).encode(y=alt.Y("seconds:Q", title="step (s)"))
    stacked = alt.vconcat(
        loss.properties(**size, height=PANEL_HEIGHT), seconds.properties(**size, height=90)
    )
    return themed(stacked.properties(title=title))


def with_panels(table: pl.DataFrame) -> pl.DataFrame:
    """Add `panel`, the name of the model and context whose runs are compared with each other."""
    return table.with_columns(pl.format("{}, context {}", "model", "context").alias("panel"))


def _backend_color(table: pl.DataFrame, **options: object) -> alt.Color:
    names: Sequence[str] = table["backend"].unique().sort().to_list()
    colors = [COLORS[number % len(COLORS)] for number in range(len(names))]
    return alt.Color(
        "backend:N", scale=alt.Scale(domain=list(names), range=colors), title="backend", **options
    )


def _nothing(message: str) -> alt.TopLevelMixin:
    """A chart that says why it is empty."""
    frame = pl.DataFrame({"message": [message]})
    mark = alt.Chart(frame, width=2 * PANEL_WIDTH, height=60).mark_text(fontSize=13, color=INK)
    return themed(mark.encode(text="message:N"))


def themed(chart: alt.TopLevelMixin) -> alt.TopLevelMixin:
    """Give a chart the look of all the others."""
    text = {"labelColor": INK, "titleColor": INK}
    return (
        chart.configure(background="transparent", font="sans-serif", padding=14)
        .configure_axis(**text, gridColor=INK, gridOpacity=0.2, domainColor=INK, tickColor=INK)
        .configure_header(**text, labelFontSize=12, labelFontWeight="bold")
        .configure_legend(**text, symbolOpacity=1, symbolStrokeWidth=2)
        .configure_title(color=INK)
        .configure_view(stroke=None)
    )
