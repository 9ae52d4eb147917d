"""Tables as text that people read, in a terminal as well as rendered."""

from collections.abc import Mapping, Sequence

import polars as pl


def markdown_table(table: pl.DataFrame) -> str:
    """A table as aligned Markdown: figures to the right with 3 significant digits, null empty."""
    headings = table.columns
    texts = [[_cell(value) for value in table[heading]] for heading in headings]
    right = [dtype.is_numeric() for dtype in table.dtypes]
    widths = [
        max(map(len, [heading, *cells])) for heading, cells in zip(headings, texts, strict=True)
    ]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * (width - 1) + (":" if to_right else "-")
        for width, to_right in zip(widths, right, strict=True)
    ]
    return "\n".join([line(headings), line(rule), *map(line, zip(*texts, strict=True))])


def three_digits(value: float) -> str:
    """A number with 3 significant digits and no exponent: 0.0123, 4.5, 1,230,000."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    if abs(rounded) >= 100:
        return f"{rounded:,.0f}"
    text = f"{rounded:#.3g}"
    return f"{rounded:.20f}".rstrip("0") if "e" in text else text


def counted(counts: Mapping[str, int]) -> str:
    """Counts by name as one phrase, the largest first: "broken-json 5, not-json 1"."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count:,}" for name, count in ranked)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return three_digits(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
