"""Words of an expression and its text, without recursion: a hostile expression may be nested thousands of levels deep."""

from __future__ import annotations

import ast
from itertools import islice

from autorl_hpc.report.routes.reading import Source

MAX_NODES = 300
"""Of one expression that is looked at for its words."""


def words(node: ast.AST) -> str:
    """Names, attributes and strings of an expression, in lower case."""
    found = []
    for each in islice(ast.walk(node), MAX_NODES):
        if isinstance(each, ast.Name):
            found.append(each.id)
        elif isinstance(each, ast.Attribute):
            found.append(each.attr)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            found.append(each.value[:80])
    return " ".join(found).lower()


def written(node: ast.expr, source: Source) -> str:
    """The text of an expression on its first line, as it stands in its file."""
    if not 1 <= node.lineno <= len(source.lines):
        return ""
    line = source.lines[node.lineno - 1][:2_000].encode("utf-8", "replace")
    end = node.end_col_offset if node.end_lineno == node.lineno else None
    text = line[node.col_offset : end].decode("utf-8", "replace").strip()
    return text if end is not None else f"{text} …"
