"""Golden text: the expected text stands in the test, next to its input.

``TRIDENT_UPDATE_GOLDEN=1 python -m pytest tests/codegen`` rewrites it in place; review the diff.
"""

from __future__ import annotations

import inspect
import os
import pathlib
import textwrap


def check_golden(actual: str, expected: str) -> None:
    """Compare `actual` with `expected`, a raw triple-quoted literal indented by four spaces."""
    wanted = textwrap.dedent(expected).strip("\n") + "\n"
    if actual == wanted:
        return
    if os.environ.get("TRIDENT_UPDATE_GOLDEN"):
        caller = inspect.stack()[1]
        path = pathlib.Path(caller.filename)
        source = path.read_text()
        literal = f'r"""{expected}"""'
        assert source.count(literal) == 1, "the expected text must be unique in its file"
        replacement = textwrap.indent(actual, "    ")
        path.write_text(source.replace(literal, f'r"""\n{replacement}    """'))
        return
    assert actual == wanted
