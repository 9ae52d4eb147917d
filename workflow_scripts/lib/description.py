"""What there is to learn from, before anything trains: a page, a table and a chart for people."""

import altair as alt
import polars as pl

from workflow_scripts.lib import charts

UNITS = {
    "conversations": "conversations",
    "rows": "rows",
    "tokens": "tokens",
    "supervised_tokens": "supervised tokens",
    "supervised_share": "share supervised",
}
REASONS = {"dropped": "left out", "cut": "cut"}


def rows_of(stats: dict) -> pl.DataFrame:
    """One row a tokenizer, context and split; lengths are tokens a row."""
    return pl.DataFrame(
        [
            {
                "tokenizer": tokenizer,
                "context": int(context),
                "split": split,
                **{heading: found[split][key] for key, heading in UNITS.items()},
                **{f"length {name}": n for name, n in found[split]["length_quantiles"].items()},
            }
            for (tokenizer, context), found in stats.items()
            for split in ("train", "val")
        ]
    ).sort("tokenizer", "context", "split")


def page_of(sessions: dict, frame: pl.DataFrame, stats: dict) -> str:
    """The Markdown page."""
    lines = [
        "# What there is to learn from",
        "",
        "{files} session files hold {sessions} sessions and {conversations} conversations with "
        "{supervised_turns} supervised turns. Of {lines_read} lines, {lines_used} were used, "
        "{lines_rejected} rejected, and {lines_outside} are no part of a conversation.".format(
            **sessions
        ),
        "",
        *_listed("Rejected lines", sessions["rejected"]),
        *_listed("Turns removed", sessions["removed"]),
        *_listed("Turns kept as context only", sessions["unsupervised"]),
        "## Rows",
        "",
        "Lengths are tokens a row. Supervised are the assistant's text, its tool calls and the "
        "token that ends its turn.",
        "",
        *_table(frame),
        "",
        "## Left out and cut",
        "",
        *_table(_reasons_of(stats)),
    ]
    return "\n".join(lines) + "\n"


def _listed(title: str, counts: dict) -> list[str]:
    named = ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.items()))
    return [f"{title}: {named or 'none'}.", ""]


def _reasons_of(stats: dict) -> pl.DataFrame:
    return pl.DataFrame(
        [
            {
                "tokenizer": tokenizer,
                "context": int(context),
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


def _table(frame: pl.DataFrame) -> list[str]:
    if frame.is_empty():
        return ["Nothing."]
    numbers = [kind.is_numeric() for kind in frame.dtypes]
    lines = [frame.columns, ["---:" if number else "---" for number in numbers]]
    lines += [[_shown(name, cell) for name, cell in row.items()] for row in frame.to_dicts()]
    return [f"| {' | '.join(line)} |" for line in lines]


def _shown(name: str, cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.1%}"
    return f"{cell:,}" if isinstance(cell, int) and name != "context" else str(cell)


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
    return charts._themed(bars)
