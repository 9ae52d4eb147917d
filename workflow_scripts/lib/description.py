"""What there is to learn from, before anything trains: a page, a table and a chart for people."""

import altair as alt
import polars as pl

from workflow_scripts.lib import charts, tables

UNITS = {
    "conversations": "conversations",
    "rows": "rows",
    "tokens": "tokens",
    "supervised_tokens": "supervised tokens",
}
REASONS = {"dropped": "left out", "cut": "cut"}


def rows_of(stats: dict) -> pl.DataFrame:
    """One row a tokenizer, context and split; lengths are tokens a row."""
    return pl.DataFrame(
        [
            {
                "tokenizer": tokenizer,
                "context": context,
                "split": split,
                **{heading: found[split][key] for key, heading in UNITS.items()},
                "supervised (%)": 100 * found[split]["supervised_share"],
                **{f"length {name}": n for name, n in found[split]["length_quantiles"].items()},
            }
            for (tokenizer, context), found in stats.items()
            for split in ("train", "val")
        ]
    ).sort("tokenizer", pl.col("context").cast(pl.Int64), "split")


def page_of(sessions: dict, frame: pl.DataFrame, stats: dict) -> str:
    """The Markdown page."""
    reasons = _reasons_of(stats)
    lines = [
        "# What there is to learn from",
        "",
        "{files} session files hold {sessions} sessions and {conversations} conversations with "
        "{supervised_turns} supervised turns. Of {lines_read} lines, {lines_used} were used, "
        "{lines_rejected} rejected, and {lines_outside} are no part of a conversation.".format(
            **sessions
        ),
        "",
        *_listed("Rejected lines and warnings", sessions["rejected"]),
        *_listed("Turns removed", sessions["removed"]),
        *_listed("Assistant turns left unsupervised", sessions["unsupervised"]),
        "## Rows",
        "",
        "Lengths are tokens a row. Supervised are the assistant's text, its tool calls and the "
        "token that ends its turn.",
        "",
        tables.markdown_table(frame),
        "",
        "## Left out and cut",
        "",
        tables.markdown_table(reasons) if reasons.height else "Nothing.",
    ]
    return "\n".join(lines) + "\n"


def _listed(title: str, counts: dict) -> list[str]:
    return [f"{title}: {tables.counted(counts) or 'none'}.", ""]


def _reasons_of(stats: dict) -> pl.DataFrame:
    return pl.DataFrame(
        [
            {
                "tokenizer": tokenizer,
                "context": context,
                "split": split,
                "what": what,
                "reason": reason.replace("-", " "),
                "count": count,
            }
            for (tokenizer, context), found in stats.items()
            for split in ("train", "val")
            for key, what in REASONS.items()
            for reason, count in found[split][key].items()
        ],
        schema=["tokenizer", "context", "split", "what", "reason", "count"],
    )


def chart_of(stats: dict) -> alt.TopLevelMixin:
    """Rows by length, one panel a tokenizer and context, the splits beside each other."""
    frame = pl.DataFrame(
        [
            {
                "panel": f"{tokenizer}, context {context}",
                "split": split,
                "low": low,
                "high": high,
                "share": rows / max(1, found[split]["rows"]),
            }
            for (tokenizer, context), found in stats.items()
            for split in ("train", "val")
            for low, high, rows in found[split]["length_histogram"]
        ]
    )
    colors = alt.Scale(domain=["train", "val"], range=charts.COLORS[:2])
    bars = (
        alt.Chart(frame, width=charts.PANEL_WIDTH, height=charts.PANEL_HEIGHT // 2)
        .mark_bar()
        .encode(
            x=alt.X("low:Q", title="tokens a row", bin="binned"),
            x2="high:Q",
            y=alt.Y("share:Q", title="share of rows", axis=alt.Axis(format="%")),
            color=alt.Color("split:N", scale=colors, legend=None),
            row=alt.Row("split:N", title=None),
            column=alt.Column("panel:N", title=None),
        )
        .resolve_scale(x="independent")
    )
    return charts.themed(bars)
