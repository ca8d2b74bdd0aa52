"""Passes of the shrinker: what each offers, as text before and after."""

from __future__ import annotations

import pytest

from gradparity.errors import CaseError
from gradparity.generate.script import Script
from gradparity.shrink import expressions, interface, lines, statements
from gradparity.shrink.cut import Pass
from gradparity.shrink.features import features
from gradparity.shrink.read import from_source


def script(program: str, run: str = "p.compile(program)") -> Script:
    return from_source(f"import torch\n\n\n{program}\n\n\ndef run(p):\n    {run}\n")


def offered(each: Pass, before: Script) -> list[str]:
    """The first definition of every script that the pass offers."""
    return [cut().definitions[0] for cut in each(before) if cut().definitions]


CHAIN = "def program(x):\n    a = x.sin()\n    b = a.cos()\n    return b.exp()"


def test_a_statement_goes_and_what_it_read_takes_its_place() -> None:
    found = offered(statements.bypassed, script(CHAIN))
    assert "def program(x):\n    b = x.cos()\n    return b.exp()" in found
    assert "def program(x):\n    a = x.sin()\n    return a.exp()" in found
    assert "def program(x):\n    return x.exp()" in found


def test_large_cuts_come_first() -> None:
    lengths = [text.count("\n") for text in offered(statements.bypassed, script(CHAIN))]
    assert lengths[0] == min(lengths)


def test_what_nobody_reads_goes_at_once() -> None:
    (found,) = offered(statements.dead, script("def program(x):\n    a = x + 1\n    b = x + 2\n    return x"))
    assert found == "def program(x):\n    return x"


def test_a_block_gives_its_inside() -> None:
    program = "def program(x):\n    with torch.no_grad():\n        y = x + 1\n    return y"
    assert offered(statements.unwrapped, script(program)) == ["def program(x):\n    y = x + 1\n    return y"]


def test_an_alias_is_what_it_stands_for() -> None:
    program = "def program(x):\n    y = x\n    return y.sin() + y"
    assert "def program(x):\n    return x.sin() + x" in offered(statements.aliases, script(program))


TABLE = "KIND = 'b'\n\n\nTABLE = {'a': abs, 'b': (1, lambda x: x.sin())}"


def test_a_constant_and_an_entry_of_a_table_stand_where_they_are_read() -> None:
    made = script(f"{TABLE}\n\n\ndef program(x):\n    return TABLE[KIND][1](x)")
    found = []
    for each in (expressions.constants,) * 3 + (expressions.called_lambdas,):
        *_, cut = each(made)
        made = cut()
        found.append(made.definitions[-1].partition("return ")[2])
    lambda_, called = "(lambda x: x.sin())", "x.sin()"
    assert found == ["TABLE['b'][1](x)", f"(1, {lambda_[1:-1]})[1](x)", f"{lambda_}(x)", called]


def test_a_branch_that_is_not_taken_gives_way_to_the_other() -> None:
    program = "def program(x):\n    if 1 > 2:\n        x = 0\n    else:\n        x = 1\n    return x"
    assert "def program(x):\n    x = 1\n    return x" in offered(statements.unwrapped, script(program))


def test_steps_settings_and_definitions_go_one_by_one() -> None:
    made = script(CHAIN).model_copy(update={"settings": ("torch.no_grad()", "torch.enable_grad()")})
    assert [cut().settings for cut in statements.settings(made)] == [
        ("torch.enable_grad()",),
        ("torch.no_grad()",),
    ]
    assert [cut().steps for cut in statements.steps(made)] == [()]
    assert [cut().definitions for cut in statements.definitions(made)] == [()]


def test_a_call_becomes_one_of_its_operands() -> None:
    found = offered(expressions.operands, script("def program(x, y):\n    return torch.atan2(x.t(), y[0])"))
    assert "def program(x, y):\n    return x.t()" in found
    assert "def program(x, y):\n    return y[0]" in found
    assert "def program(x, y):\n    return torch.atan2(x, y[0])" in found
    assert "def program(x, y):\n    return torch.atan2(x.t(), y)" in found


def test_an_operator_that_does_not_matter_becomes_a_product_or_a_sum() -> None:
    found = offered(expressions.plain_operators, script("def program(x, y):\n    return torch.atan2(x, y)"))
    assert found == [f"def program(x, y):\n    return {each}" for each in ("x * 2", "y * 2", "x + y")]


def test_arguments_and_items_go_one_by_one() -> None:
    found = offered(expressions.arguments, script("def program(x):\n    return [f(x, 1, k=2), 3]"))
    lists = ("[3]", "[f(x, 1, k=2)]", "[f(x, 1), 3]", "[f(x, k=2), 3]")
    assert found == [f"def program(x):\n    return {each}" for each in lists]


def test_a_size_shrinks_everywhere_before_it_shrinks_somewhere() -> None:
    found = offered(expressions.sizes, script("def program(x):\n    return x.view(17, 4) + x.view(17, 4)"))
    assert found[0] == "def program(x):\n    return x.view(1, 4) + x.view(1, 4)"
    assert "def program(x):\n    return x.view(1, 4) + x.view(17, 4)" in found
    assert all("17" in text or "4" in text for text in found)


def test_dtypes_become_float32() -> None:
    program = "def program(x):\n    return x.to(torch.bfloat16) + torch.ones(1, dtype=torch.bfloat16)"
    (found,) = offered(expressions.dtypes, script(program))
    assert found.count("torch.float32") == 2


def test_a_parameter_goes_with_its_argument() -> None:
    made = script("def program(x, y):\n    return x", "f = p.compile(program)\n    f(p.randn(1), p.randn(2))")
    found = [cut() for cut in interface.parameters(made)]
    assert found[1].definitions == ("def program(x):\n    return x",)
    assert found[1].steps[0].lines[1] == "f(p.randn(1))"


def test_a_result_goes_with_its_name_and_what_is_said_about_it() -> None:
    run = 'f = p.compile(program)\n    a, b = f(p.randn(1))\n    p.value("a", a)\n    p.value("b", b)'
    found = [cut() for cut in interface.results(script("def program(x):\n    return x, x + 1", run))]
    assert found[0].definitions == ("def program(x):\n    return x + 1",)
    assert found[0].steps[0].lines[1:] == ("b = f(p.randn(1))", "p.value('b', b)")


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("(a.sum() + b.sum() + c.mean()).backward()", "(b.sum() + c.mean()).backward()"),
        ("torch.autograd.backward([a, b, c], [d, e, None])", "torch.autograd.backward([b, c], [e, None])"),
        (
            "p.value('grads', torch.autograd.grad([a, b, c], [x], [d, e, g]))",
            "p.value('grads', torch.autograd.grad([b, c], [x], [e, g]))",
        ),
    ],
)
def test_a_result_goes_out_of_the_loss_with_its_cotangent(said: str, left: str) -> None:
    for call in ("f", "program"):
        run = f"f = p.compile(program)\n    a, b, c = {call}(p.randn(1))\n    {said}"
        made = script("def program(x):\n    return x, x + 1, x + 2", run)
        found = next(cut() for cut in interface.results(made))
        assert found.steps[0].lines[1:] == (f"b, c = {call}(p.randn(1))", left)


def test_the_last_pass_leaves_lines_of_the_text_out() -> None:
    texts = set()
    for cut in lines.text_lines(script(CHAIN)):
        try:
            texts.update(cut().definitions)
        except CaseError:
            continue
    assert "def program(x):\n    a = x.sin()\n    return b.exp()" in texts


def test_a_source_that_is_read_is_the_source_that_was_written() -> None:
    run = "@torch.no_grad()\ndef run(p):\n    y = 1\n    # said\n    z = 2\n"
    text = f"import torch\n\n\nclass A:\n    x = 1\n\n\n{run}"
    made = from_source(text)
    assert made.settings == ("torch.no_grad()",)
    assert made.definitions == ("class A:\n    x = 1",)
    assert [line for step in made.steps for line in step.lines] == ["y = 1", "z = 2"]
    assert from_source(made.source) == made


@pytest.mark.parametrize("text", ["def run(p)", "x = 1"])
def test_a_text_without_a_run_is_no_script(text: str) -> None:
    with pytest.raises(CaseError):
        from_source(text)


def test_features_name_what_is_done_and_not_with_what() -> None:
    function = "class torch.autograd.Function"
    program = "def program(x):\n    x[0] = 1\n    return G.apply(x / 3)"
    made = script(
        f"{function.replace(' ', ' G(')}):\n    pass\n\n\n{program}",
        'x = p.randn(3).requires_grad_()\n    x.register_hook(p.hook("a", kind="multi"))',
    )
    assert features(made) == (".apply", ".register_hook", "Div", "[…] =", function, "p.hook multi")
