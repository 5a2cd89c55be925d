"""Tables that leave out columns rather than cut figures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.table import Table
from rich.text import Text

from cotenant.cli.fitting import fit, flowing, table_width


def build(heads: Sequence[str]) -> Table:
    """Columns of 5 characters, none between them."""
    table = Table(box=None, padding=0)
    for head in heads:
        table.add_column(head, no_wrap=True)
    table.add_row(*("12345" for _ in heads))
    return table


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(15, []), (14, ["c"]), (10, ["c"]), (9, ["a", "c"]), (4, ["a", "c"])],
)
def test_columns_go_in_their_order_until_the_rest_fits(width: int, left_out: list[str]) -> None:
    table, out = fit(build, ("a", "b", "c"), ("c", "a"), width)
    assert out == left_out
    assert [column.header for column in table.columns] == [head for head in "abc" if head not in left_out]
    assert table_width(table) == 5 * (3 - len(left_out))


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (None, "12345   12345   1234567"),
        (23, "12345   12345   1234567"),
        (22, "12345   12345\n1234567"),
        (12, "12345\n12345\n1234567"),
        (15, "12345   12345\n1234567"),
        (6, "12345\n12345\n1234567"),
    ],
)
def test_lines_break_between_parts(width: int | None, text: str) -> None:
    assert flowing([Text("12345"), Text("12345"), Text("1234567")], width).plain == text
