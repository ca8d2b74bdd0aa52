"""Cuts of statements: whole steps and settings, chunks of statements, the walls of blocks, dead assignments.

In: a script. Out: edits, each of which gives a smaller one; the largest cuts first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from gradparity.generate.script import Script
from gradparity.shrink.cut import Cut
from gradparity.shrink.parsed import Parsed, Trees, blocks, nodes, rename, targets, variables

CHUNKS = (16, 8, 4, 2, 1)


def settings(script: Script) -> Iterator[Cut]:
    """Each setting."""
    for place in range(len(script.settings)):
        rest = script.settings[:place] + script.settings[place + 1 :]
        yield partial(script.model_copy, update={"settings": rest})


def steps(script: Script) -> Iterator[Cut]:
    """Each whole step, the last first."""
    for place in reversed(range(len(script.steps))):
        rest = script.steps[:place] + script.steps[place + 1 :]
        yield partial(script.model_copy, update={"steps": rest})


def definitions(script: Script) -> Iterator[Cut]:
    """Each function and class."""
    for place in range(len(script.definitions)):
        rest = script.definitions[:place] + script.definitions[place + 1 :]
        yield partial(script.model_copy, update={"definitions": rest})


def lines(script: Script) -> Iterator[Cut]:
    """Chunks of lines of a step."""
    for number, step in enumerate(script.steps):
        for size in CHUNKS:
            for start in range(0, len(step.lines) - size + 1, size):
                kept = step.lines[:start] + step.lines[start + size :]
                changed = step.model_copy(update={"lines": kept})
                rest = (*script.steps[:number], changed, *script.steps[number + 1 :])
                yield partial(script.model_copy, update={"steps": rest})


def bypassed(script: Script) -> Iterator[Cut]:
    """Chunks of statements of one block, where the names that they assign become names that they read."""
    parsed = Parsed.of(script)
    for number, block in enumerate(blocks(parsed.trees)):
        for size in CHUNKS:
            for start in range(0, len(block) - size + 1, size):
                yield partial(parsed.edited, partial(_bypass, number, start, size, 0))
        for start, statement in enumerate(block):
            if isinstance(statement, ast.Assign) and len(variables(statement.value)) > 1:
                yield partial(parsed.edited, partial(_bypass, number, start, 1, -1))


def dead(script: Script) -> Iterator[Cut]:
    """All assignments together whose names nobody reads."""
    yield partial(Parsed.of(script).edited, _drop_dead)


def unwrapped(script: Script) -> Iterator[Cut]:
    """Each block in the place of the statement that holds it."""
    parsed = Parsed.of(script)
    for number, block in enumerate(blocks(parsed.trees)):
        for start, statement in enumerate(block):
            if isinstance(statement, (ast.With, ast.If, ast.For, ast.Try)):
                yield partial(parsed.edited, partial(_unwrap, number, start, "body"))
            if isinstance(statement, ast.If) and statement.orelse:
                yield partial(parsed.edited, partial(_unwrap, number, start, "orelse"))


def aliases(script: Script) -> Iterator[Cut]:
    """Each `a = b`, with b in the place of a."""
    parsed = Parsed.of(script)
    for number, block in enumerate(blocks(parsed.trees)):
        for start, statement in enumerate(block):
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
                yield partial(parsed.edited, partial(_bypass, number, start, 1, 0))


def _bypass(number: int, start: int, size: int, which: int, trees: Trees) -> None:
    block = blocks(trees)[number]
    gone = block[start : start + size]
    del block[start : start + size]
    for statement in reversed(gone):
        read = variables(statement.value) if isinstance(statement, ast.Assign) else []
        for name in targets(statement):
            if read and name not in read:
                rename(trees, name, read[which])


def _drop_dead(trees: Trees) -> None:
    read = {node.id for node in nodes(trees) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for block in blocks(trees):
        block[:] = [each for each in block if not targets(each) or set(targets(each)) & read]


def _unwrap(number: int, start: int, field: str, trees: Trees) -> None:
    block = blocks(trees)[number]
    block[start : start + 1] = getattr(block[start], field)
