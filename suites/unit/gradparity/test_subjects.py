"""Subjects: names, what they wrap, what they say about themselves."""

import re
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from gradparity.errors import ReproError, UnavailableError, UnknownNameError
from gradparity.fired import counting
from gradparity.subjects import registry
from gradparity.subjects.base import Subject
from gradparity.subjects.places import function_at
from gradparity.subjects.registry import NAMED, full_name, listed, resolve
from gradparity.subjects.stock_newer import NEEDS, PRECOMPILE, Feature


class Reason(NamedTuple):
    """As much of a reason as the adapter uses."""

    code: str
    text: str
    stage: str = "live.capture"

    def __str__(self) -> str:
        return self.text


class Fake(ModuleType):
    """As much of retrograd as the adapter uses."""

    def __init__(self) -> None:
        super().__init__("retrograd")
        self.counters: Counter[str] = Counter()
        self.reasons: list[Reason] = []
        self.was_reset = 0
        self.backends: list[str] = []

    def compiled_autograd(self, backend: str):
        self.backends.append(backend)
        return nullcontext()

    def explain(self) -> SimpleNamespace:
        return SimpleNamespace(fallbacks=Counter(self.reasons))

    def reset(self) -> None:
        self.was_reset += 1


class FakeAot(ModuleType):
    """As much of retrograd.aot as the adapter uses: what it compiles says with what."""

    def __init__(self) -> None:
        super().__init__("retrograd.aot")
        self.made: list[tuple[str, object, dict[str, object]]] = []

    def function(self, target: object, **options: object) -> object:
        self.made.append(("function", target, options))
        return target

    def module(self, target: object, **options: object) -> object:
        self.made.append(("module", target, options))
        return target


@pytest.fixture
def fake(monkeypatch) -> Fake:
    module = Fake()
    module.aot = FakeAot()
    monkeypatch.setitem(sys.modules, "retrograd", module)
    monkeypatch.setitem(sys.modules, "retrograd.aot", module.aot)
    monkeypatch.setitem(sys.modules, "retrograd.dynamo", ModuleType("retrograd.dynamo"))
    return module


STOCKS = {
    "stock-compile:inductor": "stock-compile:aot_eager",
    "stock-passes:inductor": "stock-compile:aot_eager",
    "stock-step:inductor": "stock-step:aot_eager",
    "stock-ca:inductor": "stock-ca:aot_eager",
}
"""By subject that generates code, the stage of stock torch before it."""


NEWER = {
    "stock-precompile:eager": False,
    "stock-precompile:inductor": True,
    "stock-strict:inductor": True,
}
"""By subject that only newer releases have, whether it answers for its divergences."""


def test_which_subjects_promise_bits_and_which_answer_for_divergences(fake) -> None:
    made = {name: resolve(name) for name in NAMED if name not in NEWER}
    assert {name for name, subject in made.items() if subject.bitwise} == {
        "eager",
        "retrograd-live:eager",
        "retrograd-live+aot_eager:eager",
        "retrograd-aot:eager",
        "retrograd-aot+dynamic:eager",
        "retrograd-live+retrograd-aot:eager",
        "retrograd-compile:eager",
        "retrograd-compile+live:eager",
        "retrograd-step:eager",
    }
    assert {name for name, subject in made.items() if subject.accountable} == {
        name for name in made if name.startswith("retrograd-") or name in STOCKS
    }
    assert {name for name, subject in made.items() if subject.may_refuse and subject.accountable} == {
        name
        for name in made
        if name in STOCKS
        or name.startswith(
            ("retrograd-compile", "retrograd-step", "retrograd-live+aot", "retrograd-live+ind")
        )
    }
    assert {name: subject.stock.name for name, subject in made.items() if subject.stock} == {
        "retrograd-live+aot_eager:eager": "stock-compile:aot_eager",
        "retrograd-live+aot_eager:inductor": "stock-compile:aot_eager",
        "retrograd-live+inductor:eager": "stock-compile:inductor",
        "retrograd-live+inductor:inductor": "stock-compile:inductor",
        "retrograd-compile:eager": "stock-compile:eager",
        "retrograd-compile+live:eager": "stock-compile:eager",
        "retrograd-compile+live:inductor": "stock-compile:eager",
        "retrograd-compile:inductor": "stock-compile:eager",
        "retrograd-step:eager": "stock-compile:eager",
        "retrograd-step:inductor": "stock-compile:eager",
        **STOCKS,
    }
    assert {name: subject.rounds_as.name for name, subject in made.items() if subject.rounds_as} == {
        "retrograd-compile+live:inductor": "stock-compile:inductor",
        "retrograd-compile:inductor": "stock-compile:inductor",
        "retrograd-step:inductor": "stock-compile:inductor",
    }
    assert all(subject.name == name for name, subject in made.items())


def test_any_backend_by_name() -> None:
    assert resolve("compile:eager").backend == "eager"
    with pytest.raises(UnknownNameError, match=r"(?s)torch.compile backend 'nobody'.*try .*FILE.py:FUNCTION"):
        resolve("compile:nobody")


@pytest.mark.parametrize(
    "name", ["nobody", "planted:nothing", "import:nowhere:X", "import:sys:path", "import:x"]
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(UnknownNameError):
        resolve(name)


def test_a_subject_of_ones_own_by_import_path() -> None:
    assert isinstance(resolve("import:gradparity.subjects.base:Subject"), Subject)


def test_retrograd_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "retrograd", None)
    with pytest.raises(UnavailableError, match="pip install retrograd"):
        resolve("retrograd-live:eager")


def test_the_adapter_reports_new_fallbacks_only(fake) -> None:
    fake.reasons = [Reason("old", "old reason")]
    fake.counters.update(fallbacks=1, runs=1)
    subject = resolve("retrograd-live:aten")
    subject.begin()
    with subject.backward():
        fake.counters.update(runs=1, lowerings=2)
    assert fake.backends == ["aten"]
    assert subject.notes() == ()
    assert subject.compiles() == 2
    subject.begin()
    fake.reasons += [Reason("new-one", "new reason\nin detail")]
    assert subject.notes() == ("no backward of this case was compiled",)
    fake.counters.update(fallbacks=1)
    assert subject.notes() == ("fallback: [new-one] new reason", "no backward of this case was compiled")


def test_a_segment_without_code_is_a_fallback_of_its_case_only() -> None:
    subject = resolve("retrograd-live:aten")
    dense = torch.eye(3, requires_grad=True)
    subject.begin()
    with subject.backward():
        torch.sparse.mm(dense.detach().to_sparse().requires_grad_(), dense).sin().sum().backward()
    assert subject.notes() == ("fallback: [segment-not-compiled] torch.sparse_coo tensor",)
    subject.begin()
    with subject.backward():
        dense.sin().sum().backward()
    assert subject.notes() == ()


def test_only_a_cold_case_resets_retrograd(fake) -> None:
    subject = resolve("retrograd-live:eager")
    subject.reset(cold=False)
    assert fake.was_reset == 0
    subject.reset(cold=True)
    assert fake.was_reset == 1


def test_stock_compiled_autograd_compiles_the_backward_and_hooks_still_run_eagerly() -> None:
    subject = resolve("stock-ca:eager")
    subject.reset(cold=False)
    subject.begin()
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(subject.wrap_hook(lambda grad: seen.append(grad.tolist())))
    with subject.around(), subject.backward():
        y.sum().backward()
    assert seen == [[1.0, 1.0]]
    assert x.grad.tolist() == [2.0, 2.0]
    assert subject.compiles() > 0


def test_stock_compile_compiles_the_forward() -> None:
    subject = resolve("compile:aot_eager")
    subject.reset(cold=False)
    subject.begin()
    x = torch.ones(2, requires_grad=True)
    with subject.around():
        subject.compile(lambda t: t.sin() * 2)(x).sum().backward()
    assert subject.compiles() > 0
    assert torch.allclose(x.grad, 2 * x.detach().cos())


def test_stock_passes_stop_before_code_and_show_what_the_passes_do() -> None:
    subject = resolve("stock-passes:inductor")
    subject.reset(cold=False)
    x, w = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)
    with subject.around(), counting() as fired:
        y = subject.compile(lambda x, w: torch.relu(x @ w).t().t())(x, w)
        y.sum().backward()
    assert torch.equal(w.grad, torch.full((4, 4), 4.0))
    assert fired
    with pytest.raises(ReproError, match="compile:inductor"):
        _ = subject.script


def test_behind_a_stock_forward_both_halves_are_compiled(fake) -> None:
    subject = resolve("retrograd-live+aot_eager:inductor")
    subject.reset(cold=True)
    assert fake.was_reset == 1
    subject.stock.begin()
    x = torch.ones(2, requires_grad=True)
    with subject.around(), subject.backward():
        subject.compile(lambda t: t.sin() * 2)(x).sum().backward()
    assert fake.backends == ["inductor"]
    assert subject.stock.compiles() > 0
    assert torch.allclose(x.grad, 2 * x.detach().cos())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("retrograd-aot:eager", {"backend": "eager", "dynamic": None}),
        ("retrograd-aot:inductor", {"backend": "inductor", "dynamic": None}),
        ("retrograd-aot+dynamic:eager", {"backend": "eager", "dynamic": True}),
        ("retrograd-live+retrograd-aot:eager", {"backend": "eager"}),
    ],
)
def test_modules_and_functions_go_their_own_ways_through_the_aot_path(fake, name, options) -> None:
    subject, layer, function = resolve(name), torch.nn.Identity(), abs
    assert subject.compile(layer) is layer
    assert subject.compile(function) is function
    assert fake.aot.made == [("module", layer, options), ("function", function, options)]


@pytest.mark.parametrize("name", ["retrograd-aot:eager", "retrograd-compile:eager", "compile:retrograd"])
def test_the_aot_adapters_report_new_fallbacks_only(fake, name) -> None:
    fake.reasons = [Reason("old", "old reason", "aot.capture")]
    fake.counters.update(aot_fallbacks=1, aot_captures=1)
    subject = resolve(name)
    subject.begin()
    assert subject.notes() == ("no function of this case was captured",)
    fake.counters.update(aot_captures=1, aot_compiles=2)
    assert subject.notes() == ()
    fake.reasons += [Reason("new-one", "new reason\nin detail", "aot.capture")]
    fake.counters.update(aot_fallbacks=1)
    assert subject.notes() == ("fallback: [new-one] new reason",)


def test_compiled_graphs_of_the_aot_path_are_counted(fake) -> None:
    direct, behind = resolve("retrograd-aot:eager"), resolve("retrograd-live+retrograd-aot:eager")
    direct.begin()
    behind.begin()
    fake.counters.update(aot_compiles=2, lowerings=3)
    assert direct.compiles() == 2
    assert behind.compiles() == 5


def test_the_live_path_over_the_aot_path_reports_both(fake) -> None:
    subject = resolve("retrograd-live+retrograd-aot:eager")
    subject.begin()
    fake.reasons = [Reason("live", "of one"), Reason("ahead", "of the other", "aot.capture")]
    fake.counters.update(fallbacks=1, aot_fallbacks=1, runs=1, aot_captures=1)
    assert subject.notes() == ("fallback: [live] of one", "fallback: [ahead] of the other")
    with subject.backward():
        pass
    assert fake.backends == ["eager"]


@pytest.mark.parametrize("name", ["retrograd-aot:eager", "retrograd-compile:eager"])
def test_only_a_cold_case_resets_the_aot_path(fake, name) -> None:
    subject = resolve(name)
    subject.reset(cold=False)
    assert fake.was_reset == 0
    subject.reset(cold=True)
    assert fake.was_reset == 1


@pytest.mark.parametrize(
    ("missing", "name"),
    [
        ("retrograd", "retrograd-aot:eager"),
        ("retrograd.aot", "retrograd-live+retrograd-aot:eager"),
        ("retrograd.dynamo", "compile:retrograd"),
    ],
)
def test_parts_of_retrograd_that_are_missing(fake, monkeypatch, missing, name) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        UnavailableError, match=rf"(?s)subject {name.replace('+', '.')}.*pip install retrograd"
    ):
        resolve(name)


def test_torch_compile_gets_retrograds_backend_and_options(fake, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "compile", lambda target, **options: asked.append(options) or target)
    for name in ("retrograd-compile:inductor", "compile:retrograd"):
        resolve(name).compile(abs)
    assert asked == [{"backend": "retrograd", "options": {"backend": "inductor"}}, {"backend": "retrograd"}]


def test_flags_behind_the_backend_are_options(fake) -> None:
    resolve("retrograd-aot:eager+cudagraphs").compile(len)
    assert fake.aot.made[-1][2] == {"backend": "eager", "dynamic": None, "cudagraphs": True}
    made = resolve("retrograd-live:inductor+cudagraphs")
    assert (made.name, made.backend, made.bitwise) == (
        "retrograd-live:inductor+cudagraphs",
        "inductor",
        False,
    )
    assert resolve("retrograd-live:eager+cudagraphs").bitwise
    assert resolve("retrograd-live+aot_eager:eager").name == "retrograd-live+aot_eager:eager"


@pytest.mark.parametrize("name", ["retrograd-live:eager+nothing", "stock-ca:eager+cudagraphs"])
def test_unknown_flags(fake, name: str) -> None:
    with pytest.raises(UnknownNameError):
        resolve(name)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("inductor", "compile:inductor"),
        ("eager", "eager"),
        ("module:function", "compile:module:function"),
        ("./backend.py:function", "compile:./backend.py:function"),
        ("retrograd-live:inductor+cudagraphs", "retrograd-live:inductor+cudagraphs"),
        ("stock-ca:aot_eager", "stock-ca:aot_eager"),
    ],
)
def test_a_backend_is_named_as_people_have_it(given: str, meant: str) -> None:
    assert full_name(given) == meant


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("inductr", "inductor"),
        ("retrograd-lve:eager", "retrograd-live:eager"),
        ("planted:scal-grad", "planted:scale-grad"),
    ],
)
def test_an_unknown_name_proposes_those_that_are_like_it(name: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean .*{meant}"):
        resolve(name)


ONE = """
from torch._dynamo.backends.debugging import aot_eager

SIZE = 3


def compile_graph(gm, inputs):
    return aot_eager(gm, inputs)
"""
MORE = """
def lower(gm):
    return gm


again = lower
_hidden = lower


class Helper:
    pass
"""


def test_a_file_with_one_function_needs_no_more_than_its_name(tmp_path: Path) -> None:
    file = tmp_path / "one_backend.py"
    file.write_text(ONE)
    assert full_name(str(file)) == f"compile:{file}:compile_graph"
    assert resolve(f"compile:{file}").name == f"compile:{file}:compile_graph"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            ONE + MORE,
            r"(?s)it defines several functions; name one.*"
            r"did you mean  .*b.py:compile_graph or .*b.py:lower or .*b.py:again\?\n",
        ),
        ("", "it defines no function"),
        ("1 / 0", r"(?s)ZeroDivisionError.*try .*FILE.py:FUNCTION"),
    ],
)
def test_a_file_with_none_or_several_functions_says_which(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "b.py"
    file.write_text(text)
    with pytest.raises(UnknownNameError, match=told):
        full_name(str(file))


def test_a_function_that_a_file_lacks_is_answered_with_those_that_it_has(tmp_path: Path) -> None:
    file = tmp_path / "c.py"
    file.write_text(ONE + MORE)
    told = (
        rf"(?s)did you mean  {file}:compile_graph.*known  {file}:compile_graph, {file}:lower, {file}:again\n"
    )
    with pytest.raises(UnknownNameError, match=told):
        resolve(f"compile:{file}:compile_grph")
    with pytest.raises(UnknownNameError, match=r"(?s)did you mean  json:dumps.*try .*FILE.py:FUNCTION"):
        resolve("compile:json:dmps")


OWN = """
import gradparity

def compile_graph(gm, inputs):
    calls.append(gm)
    return gm.forward

def _calls_of():
    return calls

calls = []

class Live(gradparity.Subject):
    pass
"""


@pytest.mark.parametrize(
    "way", ["live", "aot", "aot+dynamic", "live+aot_eager", "compile", "compile+live", "live+retrograd-aot"]
)
def test_retrograd_takes_a_code_generator_from_a_file(tmp_path: Path, monkeypatch, way: str) -> None:
    file = tmp_path / f"{re.sub('[^a-z]', '_', way)}.py"
    file.write_text(OWN)
    monkeypatch.chdir(tmp_path)
    name = f"retrograd-{way}:{file.name}:compile_graph"
    subject = resolve(full_name(name))
    subject.reset(cold=True)
    assert (subject.name, subject.bitwise, subject.accountable) == (name, False, True)
    assert (subject.file, full_name(f"retrograd-{way}:{file.name}")) == (file, name)
    x = torch.ones(2, requires_grad=True)
    with subject.around(), subject.backward():
        subject.compile(lambda t: t.sin() * 2)(x).sum().backward()
    assert function_at(f"{file.name}:_calls_of")()
    assert torch.equal(x.grad, 2 * torch.ones(2).cos())


def test_the_flags_of_a_code_generator_of_a_file_are_options(fake, tmp_path: Path) -> None:
    (tmp_path / "flagged.py").write_text(OWN)
    resolve(f"retrograd-aot:{tmp_path}/flagged.py:compile_graph+cudagraphs").compile(len)
    made = fake.aot.made[-1][2]
    assert (made["backend"].__name__, made["cudagraphs"]) == ("compile_graph", True)


def test_a_subject_of_ones_own_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "h.py"
    file.write_text(OWN)
    assert resolve(f"import:{file}:Live").accountable
    for wrong, told in (("Liv", rf"did you mean  import:{file}:Live\?"), ("calls", "'list'.*not callable")):
        with pytest.raises(UnknownNameError, match=rf"(?s)unknown subject.*{told}"):
            resolve(f"import:{file}:{wrong}")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("retrograd-live:one_backnd.py:compile_graph", "one_backend.py:compile_graph"),
        ("retrograd-live:one_backend.py:compile_grap", "one_backend.py:compile_graph"),
        (
            "retrograd-lve:one_backend.py:compile_graph",
            "retrograd-live:one_backend.py:compile_graph",
        ),
        ("import:one_backnd.py:Live", "one_backend.py:Live"),
    ],
)
def test_nearest_names_are_of_the_kind_that_was_looked_up(
    tmp_path: Path, monkeypatch, name: str, meant: str
) -> None:
    (tmp_path / "one_backend.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownNameError) as found:
        resolve(name)
    assert f"did you mean  {meant}" in str(found.value)


def test_the_functions_of_a_file_are_listed_only_for_an_error(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "d.py"
    file.write_text(ONE + MORE)

    def listed(module: str) -> list[str]:
        raise AssertionError("it reads the file's text")

    monkeypatch.setattr(registry, "functions_of", listed)
    assert resolve(f"compile:{file}:compile_graph").name == f"compile:{file}:compile_graph"


def test_a_file_imports_its_neighbour_before_others_of_that_name(tmp_path: Path, monkeypatch) -> None:
    for folder, text in ((tmp_path, "raise RuntimeError('the wrong one')"), (tmp_path / "sub", ONE)):
        folder.mkdir(exist_ok=True)
        (folder / "a_neighbour.py").write_text(text)
    (tmp_path / "sub" / "e.py").write_text("from a_neighbour import compile_graph as same\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("compile:sub/e.py:same").name == "compile:sub/e.py:same"
    assert sys.path[0] == str(tmp_path)


def test_a_file_that_failed_leaves_no_module(tmp_path: Path) -> None:
    file = tmp_path / "half_a_backend.py"
    file.write_text("def compile_graph(gm, inputs): ...\n1 / 0\n")
    with pytest.raises(UnknownNameError, match="ZeroDivisionError"):
        resolve(f"compile:{file}:compile_graph")
    assert "half_a_backend" not in sys.modules


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def compile_graph(gm inputs): ...", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit('usage: no')", "SystemExit: usage: no"),
        ("import no_neighbour", "ModuleNotFoundError: No module named 'no_neighbour'"),
        ("compile_graph = 3", "compile_graph of .*, but a int"),
    ],
)
def test_a_file_that_is_no_backend_is_told_with_what_it_raises(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "f.py"
    file.write_text(text)
    with pytest.raises(UnknownNameError, match=told):
        resolve(f"compile:{file}:compile_graph")


def test_a_class_or_a_partial_of_a_file_is_a_backend(tmp_path: Path) -> None:
    file = tmp_path / "g.py"
    file.write_text(
        "import functools\n"
        "class Code:\n"
        "    def __init__(self, gm, inputs): self.run = gm.forward\n"
        "    def __call__(self, *args): return self.run(*args)\n"
        "part = functools.partial(lambda doubled, gm, inputs: gm.forward, True)\n"
    )
    for name in ("Code", "part"):
        compiled = resolve(f"compile:{file}:{name}").compile(lambda x: x.sin())
        assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())


@pytest.mark.parametrize("name", NEEDS)
def test_a_subject_of_newer_releases_says_where_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = (line for line in listed() if line.split()[0] == name)
    assert re.search(r"  torch 2\.\d\d and later", line)
    if NEEDS[name].is_there:
        assert resolve(name).accountable is (name in STOCKS or NEWER.get(name, False))
    monkeypatch.setitem(NEEDS, name, Feature("nowhere.to_be_found", "9.9"))
    (line,) = (line for line in listed() if line.split()[0] == name)
    assert line.endswith(f"  torch 9.9 and later; not in {torch.__version__}")
    with pytest.raises(
        UnavailableError, match=r"no torch.nowhere.to_be_found; releases since 9.9 have it\n  try"
    ):
        resolve(name)


def test_a_whole_step_is_one_graph_with_its_backward() -> None:
    subject, weight = resolve("stock-step:aot_eager"), torch.ones(3, requires_grad=True)

    def step(backward, x):
        backward((x * weight).sum())
        return x + 1

    subject.reset(cold=True)
    subject.begin()
    with subject.around():
        assert subject.training_step(step)(torch.full((3,), 2.0)).tolist() == [3.0, 3.0, 3.0]
    assert (subject.compiles(), weight.grad.tolist()) == (1, [2.0, 2.0, 2.0])


@pytest.mark.skipif(not PRECOMPILE.is_there, reason="torch.compiler.precompile came with torch 2.14")
def test_a_precompiled_step_is_served_again_with_other_values() -> None:
    subject, model = resolve("stock-precompile:eager"), torch.nn.Linear(3, 1)

    def step(backward, x, scale, power):
        loss = (model(x) * scale).sum() ** power
        backward(loss)
        return loss.detach()

    run = subject.training_step(step)
    for factor in (1.0, 2.0):
        model.zero_grad()
        x, scale = torch.full((2, 3), factor), torch.tensor(3.0, requires_grad=True)
        assert torch.equal(run(x, scale, 1), 3 * model(x).sum())
        assert model.weight.grad.tolist() == [[6 * factor] * 3]
        assert torch.equal(scale.grad, model(x).sum())
