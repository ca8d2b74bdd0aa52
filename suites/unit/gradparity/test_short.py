"""Short scripts: plain torch, as a person would write it, that differ as the case did."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradparity.case import Case
from gradparity.corpus import registry as corpora
from gradparity.corpus.base import Program
from gradparity.corpus.scenario import registered
from gradparity.errors import ReproError, UnknownNameError
from gradparity.finds import Judged, handed_over, named
from gradparity.fuzzing.find import Find, Folder
from gradparity.fuzzing.smaller import as_drawn, written
from gradparity.handover import label, write_short
from gradparity.repro.script import runnable
from gradparity.repro.short import short
from gradparity.subjects.base import Subject
from gradparity.subjects.registry import resolve
from gradparity.sweep import said
from gradparity.verdict import Row, Verdict

pytestmark = pytest.mark.programs

CPU = torch.device("cpu")
EIGHT = """
def run(p):
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.rand(3, requires_grad=True))
    n = p.randint(3, 2)
    x.register_hook(p.hook("on x", lambda grad: grad * 2))
    a, b = p.compile(lambda x, y: (x * 2, y * 3))(x, y)
    p.value("index", a[n])
    with p.backward():
        a.sum().backward()
"""


def row(symptom: str = "grad-none", subject: str = "compile:aot_eager") -> Row:
    return Row("c::n", 0, "c", subject, Verdict.DIVERGE, symptom, "grad y: eager None, subject zeros")


def first(source: str, subject: str = "compile:aot_eager", symptom: str = "grad-none") -> str:
    return next(short(source, resolve(subject), row(symptom, subject)))


def program(text: str) -> str:
    node = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "program")
    return ast.unparse(node)


def test_a_program_of_eight_statements_is_at_most_forty_lines_of_plain_torch() -> None:
    text = first(EIGHT)
    assert len(text.splitlines()) <= 40, text
    assert max(map(len, text.splitlines())) <= 110
    assert "gradparity" not in text
    assert program(text) == ast.unparse(
        ast.parse(
            """
def program(compile):
    order, seen = [], {}
    x = torch.randn(3, requires_grad=True)
    y = torch.rand(3, requires_grad=True)
    n = torch.randint(3, (2,))
    x.register_hook(lambda *args, at='on x': order.append(at) or (lambda grad: grad * 2)(*args))
    a, b = compile(lambda x, y: (x * 2, y * 3))(x, y)
    seen['index'] = a[n]
    a.sum().backward()
    return {**seen, 'order': order, 'x.grad': x.grad, 'y.grad': y.grad}
"""
        )
    )


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("p.value('v', p.tensor([1, 2]))", "seen['v'] = torch.tensor([1, 2])"),
        ("p.value('v', p.randn(2, dtype='bfloat16'))", "seen['v'] = torch.randn(2, dtype=torch.bfloat16)"),
        ("p.log.append(1)", "order.append(1)"),
        ("p.event('here', 1)", "order.append('here')"),
        ("m = p.module(torch.nn.Linear(1, 1), 'm')", "m = torch.nn.Linear(1, 1)"),
        (
            "a = [p.leaf(n, p.randn(1)) for n in 'ab']",
            "a = [leaves.setdefault(n, torch.randn(1)) for n in 'ab']",
        ),
        ("p.invariant('ok', 1 < 2)", "seen.update({('ok', len(seen)): bool(1 < 2)})"),
    ],
)
def test_each_word_of_the_probe_has_a_plain_one(line: str, written: str) -> None:
    assert written in program(first(f"def run(p):\n    {line}\n"))


def test_a_function_of_the_name_that_the_text_needs_gets_another() -> None:
    source = "def program(x):\n    return x.sin()\n\ndef run(p):\n    y = p.compile(program)(p.randn(1))\n"
    text = first(source)
    assert text.count("def program(") == 1
    assert "y = compile(drawn_program)(torch.randn(1))" in text
    assert first(source).partition("def drawn_program(x):\n    return x.sin()")[1]


def test_a_value_in_a_loop_keeps_its_number() -> None:
    text = program(first("def run(p):\n    for n in range(2):\n        p.value('v', n)\n"))
    assert "seen.update({('v', len(seen)): n})" in text


def test_a_payload_is_shown_where_it_differs() -> None:
    text = program(first("def run(p):\n    p.hook('h', kind='post_acc')\n", symptom="hook-payload"))
    assert "order.append([at, *(arg.grad for arg in args" in text


def test_the_backward_has_the_context_of_the_subject() -> None:
    text = first("def run(p):\n    with p.backward():\n        pass\n", "stock-ca:eager")
    assert "with backward():" in text
    assert "shown(lambda f: f, around_backward)" in text


def test_what_it_has_no_word_for_is_refused() -> None:
    with pytest.raises(ReproError, match="no short form"):
        first("def helper(p):\n    p.value('v', 1)\n\n\ndef run(p):\n    helper(p)\n")


def test_most_scenarios_have_one() -> None:
    refused, subject = [], resolve("compile:aot_eager")
    for name in list(registered())[::7]:
        try:
            case = corpora.program(Case("scenarios", name), CPU)
            compile(next(short(runnable(case), subject, row())), name, "exec")
        except ReproError:
            refused.append(name)
    assert len(refused) < len(registered()) / 7 * 0.4, refused


@pytest.mark.parametrize(
    ("case", "symptom"),
    [("gradient_of_an_unused_output", "grad-none"), ("hooks_of_a_small_network", "hook-order")],
)
def test_it_differs_as_the_case_does(case: str, symptom: str, tmp_path: Path) -> None:
    subject = resolve("compile:aot_eager")
    found = Judged(corpora.program(Case("demo", case), CPU), subject, row(symptom))
    path = write_short(found, tmp_path)
    assert path is not None
    done = subprocess.run(
        [sys.executable, "-P", path], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("eager: {")


BACKEND = """
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


def too_large(module, inputs):
    return make_boxed_func(lambda *args: [grad * 1.01 for grad in module(*args)])


def plain(module, inputs):
    return make_boxed_func(module.forward)


wrong = aot_autograd(fw_compiler=plain, bw_compiler=too_large)
"""


def test_a_backend_in_a_file_is_called_without_gradparity(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BACKEND)
    subject = resolve(f"compile:{tmp_path / 'mine.py'}:wrong")
    program = corpora.program(Case("op_db", "sin", 0), CPU)
    found = handed_over(find_of(program, subject))
    path = write_short(found, tmp_path)
    assert path is not None
    assert "gradparity" not in path.read_text()
    assert "torch.sin(x)" in path.read_text()
    assert said(Path(sys.executable), path).startswith("differs")


def find_of(program: Program, subject: Subject) -> Find:
    """The find before anything is cut."""
    script, comparison = written(program, subject, CPU)
    find = as_drawn(program.case, script, comparison)
    assert "/" not in find.name
    return find


def test_the_file_of_a_find_names_it(tmp_path: Path) -> None:
    find = find_of(corpora.program(Case("op_db", "sin", 0), CPU), resolve("planted:scale-grad"))
    file = Folder(tmp_path).save(find)
    meant = named(str(file), None, None, 0)
    assert (meant.subject, meant.case.address) == (find.subject, f"folder:{tmp_path}::{find.name}")
    with pytest.raises(UnknownNameError, match=f"known .*{find.name}"):
        named(str(tmp_path / "compile_inductor_1f2e3d4c.json"), None, None, 0)


def test_what_agrees_leaves_no_script(tmp_path: Path) -> None:
    found = Judged(
        corpora.program(Case("demo", "gradient_of_an_unused_output"), CPU), resolve("eager"), row()
    )
    told: list[str] = []
    assert write_short(found, tmp_path, told.append) is None
    assert told == [f"no short_{label(found)}.py: a short form does not show the difference: agrees"]
    assert list(tmp_path.iterdir()) == []


COSTLY = """
import time

import torch


def large(graph, inputs):
    def run(*args):
        share = torch._functorch.config.activation_memory_budget
        torch.empty(1 << (21 if share < 0.1 or share == 1 else 10))
        return graph(*args)

    return run


def late(graph, inputs):
    def run(*args):
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass
        return graph(*args)

    return run
"""


@pytest.mark.parametrize(
    ("check", "function", "told"),
    [
        ("memory", "large", "peak of eager: "),
        ("slow", "late", "seconds of eager: "),
        ("budget", "large", "peak under a budget of 0.05: "),
    ],
)
def test_what_a_check_of_costs_finds_has_a_script_that_measures_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str, function: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("costly.py").write_text(COSTLY)
    subject = resolve(f"compile:costly.py:{function}")
    script = tmp_path / "short.py"
    for asked, status in ((subject, 1), (resolve("compile:eager"), 0)):
        found = Row("c::n", 0, "c", asked.name, Verdict.MEMORY, "peak-memory", "far above", check=check)
        script.write_text(next(short(EIGHT, asked, found)))
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        assert told in done.stdout, done.stderr
        if check != "slow" or asked is subject:  # the program is so short that torch.compile is slower
            assert done.returncode == status, done.stdout


def test_what_another_check_finds_has_no_short_script() -> None:
    with pytest.raises(ReproError, match="the check leaks finds"):
        next(short(EIGHT, resolve("compile:eager"), Row("c::n", 0, "c", "s", Verdict.DIVERGE, check="leaks")))
