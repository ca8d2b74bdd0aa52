"""Graphs in parts: the results of the whole, fewer compilations, values let go in time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.graph.fx import boxed
from retrograd.repeats.compile import divide
from retrograd.repeats.divide import divided
from retrograd.repeats.outline import graph_of, tokenised

Fn = Callable[..., Any]


def traced(fn: Fn, *inputs: torch.Tensor, dynamic: bool = False) -> tuple[fx.GraphModule, list[Any]]:
    """The graph of `fn`, and fakes of its inputs."""
    gm = make_fx(fn, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    return gm, [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


class Compiler:
    """Interprets graphs; remembers them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.pinned: list[int | None] = []

    def __call__(self, gm: fx.GraphModule, examples: Sequence[Any], visible: int | None) -> Any:
        assert len(examples) == len(gm.graph.find_nodes(op="placeholder"))
        self.graphs.append(gm)
        self.pinned.append(visible)
        return boxed(gm)


def agree(
    fn: Fn, *inputs: torch.Tensor, least: int = 2, visible: int | None = None, dynamic: bool = False
) -> Compiler:
    """Compile in parts and compare with a call of `fn`."""
    gm, examples = traced(fn, *inputs, dynamic=dynamic)
    compiler = Compiler()
    run = divide(gm, examples, least, visible).code(compiler)
    given = list(inputs)
    torch.manual_seed(0)
    want = fn(*inputs)
    torch.manual_seed(0)
    got = run(given)
    assert given == []
    assert len(want) == len(got)
    for one, other in zip(want, got, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
    return compiler


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).relu() * 0.5 + x


def layers(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for w in weights:
        x = layer(x, w)
    return (x,)


def square(count: int, size: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(size, size) for _ in range(count)]


def test_an_index_by_numbers_does_not_depend_on_data() -> None:
    """Torch tags the operator as if it always did. Models choose rows of a mask or a table by it."""

    def fn(x: torch.Tensor, rows: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return layers(x[rows], *weights)

    rows = torch.tensor([2, 0, 1, 3])
    assert len(agree(fn, square(1)[0], rows, *square(5)).graphs) == 3  # the index, a layer, the last one


def text(gm: fx.GraphModule) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(shown, value))}]"
        return str(value)

    lines = []
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"return {shown(node.args[0])}")
        elif node.op == "placeholder":
            lines.append(f"{node.name}: {list(node.meta['val'].shape)}")
        else:
            lines.append(f"{node.name} = {node.target}({', '.join(map(shown, node.args))})")
    return "\n".join(lines)


def test_three_layers() -> None:
    gm, _ = traced(lambda x, *w: (*layers(x.sin(), *w), x.cos()), *square(4))
    parts = divided(gm.graph, 3, 2)
    known: dict[Any, int] = {}
    lines = []
    for part in parts:
        number = known.setdefault(part.key, len(known))
        reads, makes = ", ".join(map(str, part.inputs)), ", ".join(map(str, part.outputs))
        lines.append(f"{makes} = part_{number}({reads})")
    first = {part.key: text(graph_of(gm, part, [])) for part in reversed(parts)}
    shown = [f"part_{number}:\n{first[key]}" for key, number in known.items()]
    assert_expected_inline(
        "\n\n".join(["\n".join(lines), *shown]),
        """\
sin = part_0(arg0_1)
add = part_1(sin, arg1_1)
add_1 = part_1(add, arg2_1)
add_2 = part_1(add_1, arg3_1)
cos = part_2(arg0_1)

part_0:
in_0: [4, 4]
sin = aten.sin.default(in_0)
return [sin]

part_1:
in_0: [4, 4]
in_1: [4, 4]
mm = aten.mm.default(in_0, in_1)
relu = aten.relu.default(mm)
mul = aten.mul.Tensor(relu, 0.5)
add = aten.add.Tensor(mul, in_0)
return [add]

part_2:
in_0: [4, 4]
cos = aten.cos.default(in_0)
return [cos]""",
    )


def test_layers_are_compiled_once() -> None:
    compiler = agree(layers, *square(9), visible=1)
    assert len(compiler.graphs) == 1


def test_what_is_no_layer_is_compiled_with_its_neighbours() -> None:
    def fn(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (y,) = layers(x.sin().cos(), *weights[1:])
        return y.exp(), (y @ weights[0]).sum()

    compiler = agree(fn, *square(7))
    assert len(compiler.graphs) == 3


def test_a_short_graph_is_compiled_whole() -> None:
    compiler = agree(layers, *square(3), least=50, visible=1)
    assert len(compiler.graphs) == 1
    assert compiler.pinned == [1]


def test_results_that_must_keep_their_strides_come_first() -> None:
    def fn(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = []
        for w in weights:
            y = x @ w
            kept.append(y)
            x = y.relu() * 0.5 + x
        return (x, *kept)

    compiler = agree(fn, *square(6), visible=1)
    assert set(compiler.pinned) == {1}
    assert [len(gm.graph.output_node().args[0]) for gm in compiler.graphs] == [2]  # type: ignore[arg-type]


def test_a_layer_whose_number_differs_is_another() -> None:
    def fn(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for i, w in enumerate(weights):
            x = (x @ w).relu() * (0.5 if i < 3 else 0.25) + x
        return (x,)

    assert len(agree(fn, *square(7), visible=1).graphs) == 2


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0)])
def test_numbers_that_python_takes_for_equal(one: Any, other: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = [graph.call_function(torch.ops.aten.mul.Tensor, (x, value)) for value in (one, other, one)]
    for call in calls:
        call.meta["val"] = torch.ones(2)
    tokens = [tokenised(call).token for call in calls]
    assert tokens[0] == tokens[2] != tokens[1]


def test_where_the_same_value_is_read_twice() -> None:
    def fn(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for i, w in enumerate(weights):
            x = torch.where(x > 0, *((x, w) if i % 4 < 2 else (w, x))) * (x @ w)
        return (x,)

    agree(fn, *square(9))


def test_inputs_of_other_strides_are_other_layers() -> None:
    weights = square(7)
    weights[2:4] = [w.t() for w in weights[2:4]]
    assert len(agree(layers, *weights).graphs) > 1


def test_random_numbers_are_drawn_anew_in_every_copy() -> None:
    def fn(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = []
        for w in weights:
            drawn = torch.rand_like(x)
            x = (x @ w) * drawn
            kept.append(drawn)
        return x, *kept

    assert len(agree(fn, *square(7), visible=7).graphs) == 1


def test_calls_with_effects_are_in_no_copy() -> None:
    def fn(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for w in weights:
            torch.ops.aten._linalg_check_errors(torch.zeros((), dtype=torch.int32), "inv", is_matrix=True)
            x = layer(x, w)
        return (x,)

    gm, _ = traced(fn, *square(7))
    assert divided(gm.graph, 6, None) == []
    assert len(divided(gm.graph, 3, None)) != 1


def test_results_of_one_call_stay_with_it() -> None:
    def fn(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = []
        for w in weights:
            values, places = (x @ w).max(1, keepdim=True)
            x = x.relu() * values
            kept.append(places)
        return x, *kept

    compiler = agree(fn, *square(7), least=3)
    assert len(compiler.graphs) < 6


def test_constants_that_the_graph_holds() -> None:
    def fn(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for w in weights:
            x = layer(x, w) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return (x,)

    assert len(agree(fn, *square(7), visible=1).graphs) == 1


def test_results_that_are_inputs_constants_or_given_twice() -> None:
    def fn(x: torch.Tensor, *weights: torch.Tensor) -> tuple[Any, ...]:
        (y,) = layers(x, *weights)
        return y, x, y, weights[0]

    gm, examples = traced(fn, *square(7))
    output = gm.graph.output_node()
    output.args = ((*output.args[0], None, 3),)  # type: ignore[misc]
    inputs = square(7)
    got = divide(gm, examples, 2, None).code(Compiler())(list(inputs))
    assert got[0] is got[2]
    assert got[1] is inputs[0]
    assert got[3] is inputs[1]
    assert got[4:] == [None, 3]


def test_symbolic_sizes() -> None:
    compiler = agree(layers, torch.randn(3, 4), *square(6), dynamic=True)
    assert len(compiler.graphs) <= 2


def test_sizes_that_a_layer_only_has_in_expressions() -> None:
    """They come as inputs of their own."""

    def fn(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return layers(torch.cat([x, x]), *weights)

    inputs = [torch.randn(3, 4), *square(6)]
    gm, examples = traced(fn, *inputs, dynamic=True)
    compiler = Compiler()
    run = divide(gm, examples, 3, 1).code(compiler)
    assert any(node.name == "size_0" for part in compiler.graphs for node in part.graph.nodes)
    assert len(compiler.graphs) < 6
    for rows in (3, 9):
        inputs[0] = torch.randn(rows, 4)
        torch.testing.assert_close(run(list(inputs))[0], fn(*inputs)[0], rtol=0, atol=0)


def test_values_are_let_go_before_the_last_call_that_reads_them() -> None:
    gm, examples = traced(layers, *square(6))
    alive: list[int] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    def compile_part(part: fx.GraphModule, fakes: Sequence[Any], visible: int | None) -> Any:
        code = boxed(part)

        def run(args: list[Any]) -> Sequence[Any]:
            results = code(args)
            seen.extend(weakref.ref(result) for result in results)
            alive.append(sum(each() is not None for each in seen))
            return results

        return run

    run = divide(gm, examples, 2, None).code(compile_part)
    inputs = square(6)
    held = [weakref.ref(value) for value in inputs]
    run(inputs)
    assert len(alive) > 2
    assert max(alive) == 1
    assert not any(each() is not None for each in held)


def test_thousands_of_calls_are_searched_once() -> None:
    """The work for twice the layers is about twice the work."""
    counts = []
    for count in (40, 80):
        gm, _ = traced(layers, *square(count + 1, 2))
        parts = divided(gm.graph, 3, 1)
        counts.append((len(parts), len({part.key for part in parts})))
    assert counts[0][1] == counts[1][1] == 1
    assert counts[1][0] == 2 * counts[0][0]


def test_what_was_computed_of_large_tensors_is_handed_over() -> None:
    def fn(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = x.sin()
        for w in weights:
            x = ((x @ w).relu() * scale).tanh() + x
        return (x,)

    gm, _ = traced(fn, *square(6))
    parts = divided(gm.graph, 4, 1)
    assert all(str(node) != "sin" for part in parts[1:] for node in part.calls)
