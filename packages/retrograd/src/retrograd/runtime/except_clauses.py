"""Finds user code that catches errors: ``try``, ``finally`` and context managers around a call.

In: the instruction that makes the call, as Dynamo describes it; or the running frames. Out: whether an error
raised by the call reaches such code. If it does, the call cannot go into a graph, which raises only when it
runs, outside of that code.

An ``except`` clause counts unless its classes, if they are global names, match none of the errors raised. A
``finally`` counts for some errors only; see `Errors`.
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dis import get_instructions
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch._dynamo.bytecode_transformation import (
    Instruction,
    convert_instruction,
    virtualize_exception_table,
    virtualize_jumps,
)

from retrograd.graph.operator_effects import Errors

#: The folders of torch and of this package.
_NOT_THE_USERS = tuple(os.path.dirname(at) + os.sep for at in (torch.__file__, os.path.dirname(__file__)))


def catches(call: Instruction, code: Sequence[Instruction], names: Mapping[str, Any], errors: Errors) -> bool:
    """Whether one of `errors`, raised by `call`, reaches a ``try`` of the function. Context managers do not
    count.

    Args:
        call: an instruction of `code`.
        code: the instructions of the function.
        names: its global variables.
        errors: what may be raised.
    """
    return any(
        not _is_with(code, target) and _may_catch(code, target, names, errors)
        for target in _handlers(call, code)
    )


def line_that_catches(caller: CodeType, errors: Errors) -> str | None:
    """The file and line of user code that would catch one of `errors` raised here; None if none would.

    Args:
        caller: code of the running function that called the user's code; frames outside of it do not count.
        errors: what may be raised.
    """
    found, frame = None, sys._getframe(1)
    while frame is not None and frame.f_code is not caller:
        is_the_users = not frame.f_code.co_filename.startswith(_NOT_THE_USERS)
        if found is None and is_the_users and _catches_here(frame, errors):
            found = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else found


def _catches_here(frame: FrameType, errors: Errors) -> bool:
    if not frame.f_code.co_exceptiontable:
        return False
    code = _instructions_of(frame.f_code)
    *_, call = (one for one in code if one.offset is not None and one.offset <= frame.f_lasti)
    if catches(call, code, frame.f_globals, errors):
        return True
    targets = [target for target in _handlers(call, code) if _is_with(code, target)]
    return any(not _is_of_torch(_manager_name(code, target), frame) for target in targets)


@functools.lru_cache(maxsize=64)
def _instructions_of(code: CodeType) -> Sequence[Instruction]:
    instructions = [*map(convert_instruction, get_instructions(code))]
    virtualize_exception_table(code.co_exceptiontable, instructions)
    virtualize_jumps(instructions)
    return instructions


def _handlers(call: Instruction, code: Sequence[Instruction]) -> list[int]:
    """Start positions of the handlers around `call`, innermost first. We skip those that only restore the
    interpreter's stack."""
    found, entry = [], call.exn_tab_entry
    while entry is not None:
        if entry.target.opname == "PUSH_EXC_INFO":
            found.append(code.index(entry.target))
        entry = entry.target.exn_tab_entry
    return found


def _is_with(code: Sequence[Instruction], target: int) -> bool:
    return code[target + 1].opname == "WITH_EXCEPT_START"


def _may_catch(code: Sequence[Instruction], target: int, names: Mapping[str, Any], errors: Errors) -> bool:
    """Check the ``except`` clauses of a handler. A bare ``except`` or a ``finally`` has none."""
    place = target + 1
    if not errors.heeds_finally and _passes_on(code, place):
        return False
    while code[place].opname != "RERAISE":
        classes: list[Any] = []
        while (step := code[place]).opname in ("LOAD_GLOBAL", "LOAD_ATTR", "BUILD_TUPLE"):
            if step.opname == "LOAD_GLOBAL":
                classes.append(names.get(step.argval, getattr(builtins, step.argval, None)))
            elif step.opname == "LOAD_ATTR":
                classes.append(getattr(classes.pop(), step.argval, None))
            place += 1
        jump = code[place + 1]
        if step.opname != "CHECK_EXC_MATCH" or jump.target is None:
            return True
        if any(_is_one_of(given, errors.classes) for given in classes):
            return True
        place = code.index(jump.target)
    return False


def _passes_on(code: Sequence[Instruction], place: int) -> bool:
    """Whether a handler re-raises every error."""
    names = [one.opname for one in code[place:]]
    return not {"CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT"} & {*names[: names.index("RERAISE")]}


def _is_one_of(given: Any, errors: tuple[type[Exception], ...]) -> bool:
    classes = given if isinstance(given, tuple) else (given,)
    return any(
        not isinstance(one, type) or issubclass(one, error) or issubclass(error, one)
        for one in classes
        for error in errors
    )


def _manager_name(code: Sequence[Instruction], target: int) -> str | None:
    """The first name in the expression of the ``with`` whose handler begins at `target`."""
    inside = [one for one in code if one.exn_tab_entry and one.exn_tab_entry.target is code[target]]
    place = code.index(inside[0]) - 1
    made = code[place - (code[place].opname == "BEFORE_WITH")].positions
    for one in code:
        if one.opname.startswith("LOAD_") and isinstance(one.argval, str) and made and one.positions:
            begins = one.positions.lineno, one.positions.col_offset
            if begins == (made.lineno, made.col_offset):
                return one.argval
    return None


def _is_of_torch(name: str | None, frame: FrameType) -> bool:
    """Whether a name in the frame is torch or comes from torch, whose context managers pass errors on and
    restore what they have set."""
    value = frame.f_locals.get(name or "", frame.f_globals.get(name or ""))
    if isinstance(value, ModuleType):
        module = value.__name__
    else:
        module = getattr(value, "__module__", None) or type(value).__module__
    return module.partition(".")[0] == "torch"
