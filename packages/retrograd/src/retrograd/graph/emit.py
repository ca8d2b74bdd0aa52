"""Generate straight-line Python that runs a graph, a plan or a chain of compiled code, without an
interpreter.

In: values (FX nodes, or hashable values that name one), calls and constants. Out: a function. No module and
no cache of source lines refers to it, so it is freed with its last user.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch import fx

#: A function that takes a list of inputs, which it may clear.
Boxed = Callable[[list[Any]], Sequence[Any]]
#: Types whose values are written as literals.
_LITERALS = frozenset({int, bool, type(None)})


class Emitter:
    """Builds the text of one function.

    Attributes:
        lines: the text.
        names: the values that the text refers to, by name.
        local: the variable of each value.
    """

    def __init__(self, head: str) -> None:
        self.lines = [f"def {head}:"]
        self.names: dict[str, Any] = {}
        self.local: dict[Any, str] = {}
        self._head = head
        self._indent = 1

    def line(self, text: str) -> None:
        """Append a line."""
        self.lines.append("    " * self._indent + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Inside, lines are indented under `head`."""
        self.line(head)
        self._indent += 1
        yield
        self._indent -= 1

    def name(self, value: Hashable) -> str:
        """The local variable for a value."""
        if value not in self.local:
            self.local[value] = f"v{len(self.local)}"
        return self.local[value]

    def refer(self, prefix: str, value: Any) -> str:
        """Add a name for a value from outside the function."""
        name = f"{prefix}_{len(self.names)}"
        self.names[name] = value
        return name

    def listed(self, values: Iterable[Hashable]) -> str:
        """The variables of `values`, as the text of a list."""
        return f"[{', '.join(map(self.name, values))}]"

    def unpack(self, values: Iterable[Hashable], source: str) -> None:
        """Unpack `source` into the variables of `values`."""
        targets = "".join(f"{self.name(value)}, " for value in values)
        self.line(f"{targets}= {source}" if targets else source)

    def let_go(self, values: Iterable[Hashable]) -> None:
        """Delete the variables of `values`, if they exist, in the order in which they were named."""
        names = sorted(
            (self.local[value] for value in values if value in self.local), key=lambda v: int(v[1:])
        )
        if names:
            self.line(f"del {', '.join(names)}")

    def expression(self, argument: Any) -> str:
        """The text of an FX node's argument. Nodes become local variables."""
        if isinstance(argument, fx.Node):
            return self.name(argument)
        if isinstance(argument, list):
            return f"[{', '.join(map(self.expression, argument))}]"
        if isinstance(argument, tuple):
            return f"({''.join(self.expression(item) + ', ' for item in argument)})"
        if isinstance(argument, dict):
            items = (f"{self.refer('k', key)}: {self.expression(item)}" for key, item in argument.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(argument, slice):
            parts = map(self.expression, (argument.start, argument.stop, argument.step))
            return f"{self.refer('c', slice)}({', '.join(parts)})"
        return repr(argument) if type(argument) in _LITERALS else self.refer("c", argument)

    def function(self) -> Callable[..., Any]:
        """Compile the text."""
        scope = dict(self.names)
        name = self._head.split("(", 1)[0]
        exec(compile("\n".join(self.lines), f"<retrograd {name}>", "exec"), scope)
        made: Callable[..., Any] = scope[name]
        return made


#: CPython allocates frames from chunks. A frame that does not fit gets a new chunk: of 2048 words, or of the
#: next power of two in which the frame and `_OVERHEAD` words fit. Ours has at least `_ROOM` words left. A
#: frame of fewer than `_LARGE` words stays where it is, as in eager: its own chunk would cost more time.
_OVERHEAD, _ROOM, _LARGE = 1000, 1 << 13, 1 << 9


def with_room(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Give the frame of `fn`, if it is large, a chunk in which all its callees fit. Returns `fn`.

    A call that finds no room allocates a chunk, and frees it when it returns. Below a function with thousands
    of variables, this happened in every call that a hook made, and doubled the time of a backward.
    """
    code = fn.__code__
    if (words := code.co_nlocals + code.co_stacksize) < _LARGE:
        return fn
    size = max(_ROOM, 1 << (words + _OVERHEAD).bit_length())
    # With the overhead, the frame is a little larger than `size`, so its chunk is twice as large.
    fn.__code__ = code.replace(co_stacksize=size - _OVERHEAD + 100 - code.co_nlocals)
    return fn


def last_uses(reads: Iterable[tuple[int, Iterable[Hashable]]]) -> dict[int, list[Any]]:
    """For each place, the values whose last read is there. `reads` come in order."""
    last: dict[Any, int] = {}
    for place, values in reads:
        last.update(dict.fromkeys(values, place))
    places: dict[int, list[Any]] = {}
    for value, place in last.items():
        places.setdefault(place, []).append(value)
    return places


def boxed_calls(
    inputs: Sequence[fx.Node], calls: Sequence[fx.Node], results: Any, root: object = None
) -> Boxed:
    """Generate a function that makes `calls` in order and returns `results`. It clears its list of inputs.

    Args:
        inputs: nodes whose values are in the list.
        calls: nodes. Apart from `results`, nothing else may read their values.
        results: an FX argument.
        root: holds the constants that ``get_attr`` nodes name.
    """
    emit = Emitter("run(args)")
    returned: list[fx.Node] = []
    fx.node.map_arg(results, returned.append)
    kept, read = set(returned), {value for node in calls for value in node.all_input_nodes}
    emit.unpack(inputs, "args")
    emit.line("args.clear()")
    emit.let_go(value for value in inputs if value not in read and value not in kept)
    emit_calls(emit, calls, [value for value in (*inputs, *calls) if value not in kept], root)
    emit.line(f"return {emit.expression(results)}")
    return emit.function()


def emit_calls(
    emit: Emitter,
    calls: Sequence[fx.Node],
    let_go: Iterable[fx.Node],
    root: object = None,
    instead: Callable[[fx.Node], str | None] = lambda node: None,
) -> None:
    """Emit lines that make `calls` in order, and delete each of `let_go` after the last call that reads it.

    `instead` may return another text for a call.
    """
    gone = set(let_go)
    reads = ((i, (node, *node.all_input_nodes)) for i, node in enumerate(calls))
    dying = last_uses((i, [value for value in values if value in gone]) for i, values in reads)
    for i, node in enumerate(calls):
        value: str | None
        if node.op == "get_attr":
            value = emit.refer("held", attrgetter(str(node.target))(root))
        elif (value := instead(node)) is None:
            named = [f"{name}={emit.expression(argument)}" for name, argument in node.kwargs.items()]
            items = [*map(emit.expression, node.args), *named]
            if node.op == "call_method":
                owner = items.pop(0)
                called = f"{owner}.{node.target}"
            else:
                target = attrgetter(str(node.target))(root) if node.op == "call_module" else node.target
                called = emit.refer("call", target)
            value = f"{called}({', '.join(items)})"
        emit.line(f"{emit.name(node)} = {value}")
        emit.let_go(dying.get(i, ()))
