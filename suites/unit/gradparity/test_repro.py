"""Repros: scripts in plain torch that differ as the case did; they check, test and cut down themselves."""

import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradparity.case import Case
from gradparity.corpus import registry as corpora
from gradparity.corpus.base import Program
from gradparity.corpus.generated import scripted
from gradparity.corpus.scenario import registered
from gradparity.errors import ReproError
from gradparity.finds import Judged
from gradparity.handover import write_script, write_short
from gradparity.observe import Observed, observe
from gradparity.outcome import describe
from gradparity.repro import standalone
from gradparity.repro.script import runnable, script
from gradparity.repro.sources import source_of
from gradparity.shrink.read import from_source
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row, Verdict

pytestmark = pytest.mark.programs

CPU = torch.device("cpu")
FACTOR = 3


def scaled(p, power: int = 1) -> None:
    """Uses a constant, a function and a parameter."""
    p.value("v", doubled(p.randn(2)) * FACTOR**power)


def doubled(x: torch.Tensor) -> torch.Tensor:
    # A comment that the script keeps.
    return x * 2


def row(case: Case, subject: str) -> Row:
    return Row(case.address, 0, case.corpus, subject, Verdict.DIVERGE, "values", 'a "reason" \\ of some kind')


def text_of(program: Program, subject: str = "compile:aot_eager") -> str:
    return script(program, resolve(subject), row(program.case, subject), CPU)


def run(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(path), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=path.parent, timeout=120, check=False)


def called(path: Path, *words: str) -> int:
    """Runs the script in this process."""
    return runpy.run_path(str(path))["main"](list(words))


@pytest.fixture(scope="module")
def order(tmp_path_factory) -> Path:
    """The script of a hook order that stock AOTAutograd changes."""
    program = corpora.program(Case("demo", "hooks_of_a_small_network"), CPU)
    subject = resolve("compile:aot_eager")
    found = Judged(program, subject, row(program.case, subject.name))
    return write_script(found, tmp_path_factory.mktemp("repro"), CPU)


def test_it_needs_nothing_but_torch_and_differs(order: Path) -> None:
    text = order.read_text()
    assert "gradparity" not in text.partition("# --- program")[2]
    assert "import gradparity" not in text
    done = run(order)
    assert (done.returncode, done.stderr) == (1, "")
    assert "order of hooks: eager ['post_acc 2.bias'" in done.stdout
    assert "event 0 post_acc 2.bias" in done.stdout


def test_it_is_a_failing_test_of_torch(order: Path, capfd) -> None:
    assert called(order, "--unittest") == 1
    told = capfd.readouterr().err
    assert "test_as_in_eager (" in told
    assert "order of hooks" in told


def test_it_cuts_itself_down(order: Path) -> None:
    assert called(order, "--minify") == 0
    small = order.with_name(f"{order.stem}_min.py")
    program = small.read_text().partition("# --- program")[2].partition("# --- recorder")[0]
    assert '"""Eager accumulates' not in program
    assert called(small, "check") == 1


def test_an_unknown_command_is_refused(order: Path, capsys) -> None:
    assert called(order, "solve") == 4
    assert "known: run, check" in capsys.readouterr().out


def test_a_case_that_agrees_has_no_difference(tmp_path: Path, capsys) -> None:
    path = tmp_path / "repro.py"
    path.write_text(text_of(corpora.program(Case("op_db", "sin", 0), CPU)))
    assert called(path, "check") == 0
    assert capsys.readouterr().out.strip() == "no difference"


def test_functions_and_constants_come_along_as_they_were_written() -> None:
    source = source_of(scaled)
    assert list(source.definitions) == ["doubled", "FACTOR", "scaled"]
    assert "# A comment that the script keeps." in source.text()
    assert source.imports == {"torch": "import torch"}


def test_arguments_of_a_partial_are_written_out() -> None:
    program = Program(Case("c", "n"), scaled, plain=partial(scaled, power=2))
    text = text_of(program)
    assert "def program(p):\n    scaled(p, power=2)" in text
    compile(text, "repro.py", "exec")


def test_a_program_given_as_text_is_taken_as_it_is() -> None:
    program = Program(
        Case("c", "n"), scaled, source="import math\n\n\ndef run(p):\n    p.value('v', math.pi)\n"
    )
    text = text_of(program)
    assert "PROGRAM = run" in text
    assert "WIDEN = True" in text
    compile(text, "repro.py", "exec")


def test_variables_of_the_outer_function_become_constants() -> None:
    kind, double = "doubled", lambda x, times=FACTOR: doubled(x) * times

    def inner(p) -> None:
        p.value(kind, double(p.randn(2)))

    source = source_of(inner)
    assert list(source.definitions) == ["FACTOR", "doubled", "double", "kind", "inner"]
    assert source.definitions["kind"] == "kind = 'doubled'"
    assert source.definitions["double"] == "double = (lambda x, times=FACTOR: doubled(x) * times)"
    names: dict = {"torch": torch}
    exec(source.text(), names)
    seen: dict = {}
    names["inner"](SimpleNamespace(randn=torch.ones, value=seen.__setitem__))
    assert seen["doubled"].tolist() == [6.0, 6.0]


@pytest.mark.parametrize("case", ["autocast_around_of_a_weight_used_twice", "aot_draw_gamma_transposed"])
def test_a_row_of_a_table_of_scenarios_runs_as_text(case: str) -> None:
    program = corpora.program(Case("scenarios", case), CPU)
    text = scripted(program.case, from_source(runnable(program)))
    one, two = (observe(each.case, each.body, Observed(), torch.float32, CPU) for each in (program, text))
    assert one.raised is None
    assert [describe(item.value) for item in (*one.grads, *one.values)] == [
        describe(item.value) for item in (*two.grads, *two.values)
    ]


def test_what_cannot_be_written_says_why() -> None:
    held = object()

    def inner(p) -> None:
        p.value("v", held)

    with pytest.raises(ReproError, match="cannot know the variable <object"):
        text_of(Program(Case("c", "n"), inner))
    with pytest.raises(ReproError, match="has no form in plain torch"):
        text_of(corpora.program(Case("demo", "hooks_of_two_branches"), CPU), "planted:scale-grad")


def test_every_scenario_can_be_written() -> None:
    refused = {}
    for name, item in registered().items():
        try:
            compile(text_of(Program(Case("scenarios", name), item.body, item.doc)), name, "exec")
        except (ReproError, SyntaxError) as error:
            refused[name] = str(error)
    assert refused == {}


@pytest.mark.parametrize(
    "subject", ["stock-ca:eager", "retrograd-live:eager", "retrograd-aot:eager", "retrograd-compile:eager"]
)
def test_a_subject_says_how_a_user_calls_it(subject: str) -> None:
    program = corpora.program(Case("demo", "hooks_of_two_branches"), CPU)
    text = text_of(program, subject)
    compile(text, "repro.py", "exec")
    assert "def around_backward" in text


class TestComparison:
    @pytest.mark.parametrize(
        ("eager", "subject", "reference", "said"),
        [
            (torch.ones(2), torch.ones(2), None, ""),
            (torch.ones(2), torch.ones(2) + 1e-6, torch.ones(2, dtype=torch.float64), ""),
            (torch.ones(2), torch.ones(2) + 1e-2, torch.ones(2, dtype=torch.float64), "error 0.01"),
            (torch.ones(2), torch.ones(2).double(), None, "dtype is torch.float32"),
            (torch.ones(2, 2), torch.ones(2, 2).t(), None, "strides are [2, 1]"),
            (torch.ones(2), None, None, "eager tensor"),
            (torch.tensor([float("nan")]), torch.tensor([float("nan")]), None, ""),
            (torch.tensor([1]), torch.tensor([2]), None, "not equal"),
            ((1, 2), (1, 3), None, "eager 2"),
            (1.0, 1.0 + 1e-9, None, ""),
        ],
    )
    def test_as_the_oracles_judge(self, eager, subject, reference, said: str) -> None:
        found = standalone.unlike(eager, subject, reference)
        assert found.startswith(said) if said else found == ""


def test_the_recorder_sees_dictionaries_what_is_printed_and_rounding() -> None:
    grad = torch.linspace(0.1, 0.9, 8)
    assert "bfloat16" in standalone.unlike(grad, grad.bfloat16().float(), grad.bfloat16().double())
    assert not standalone.unlike(grad, grad * 1, grad.double())
    before = standalone.frozen(held := {"runs": 1})
    held["runs"] = 2
    assert standalone.unlike(before, standalone.frozen(held), None)
    recorder = standalone.Recorder(False, torch.float32)
    recorder.printed.write("one\ntwo\n")
    recorder.log.append("zero")
    recorder.finish()
    assert recorder.shown["log"] == ("zero", "one", "two")


def test_a_backend_in_a_file_of_the_working_folder_is_found_from_everywhere(tmp_path, monkeypatch) -> None:
    """The script needs no gradparity, and may be started in another folder than the one of the backend."""
    home = tmp_path / "home"
    home.mkdir()
    text = "def wrong(gm, inputs):\n    return lambda *args: tuple(2 * one for one in gm(*args))\n"
    (home / "my_backend.py").write_text(text)
    monkeypatch.chdir(home)
    program = corpora.program(Case("op_db", "sin", 0), CPU)
    for place in ("my_backend.py:wrong", "my_backend:wrong"):
        path = tmp_path / "repro.py"
        path.write_text(text_of(program, place))
        assert "gradparity" not in path.read_text().partition("# --- program")[0].partition('"""\n\n')[2]
        done = run(path, "check")
        assert (done.returncode, "Error" in done.stdout) == (1, False), done.stdout + done.stderr


@pytest.mark.parametrize("write", [lambda found, out: write_script(found, out, CPU), write_short])
def test_a_script_names_the_files_that_it_needs_and_where_they_are(tmp_path, write) -> None:
    """By a path from the script's own folder; one that cannot import them says so, and does not differ."""
    text = (
        "import {}\n\ndef wrong(gm, inputs):\n    return lambda *args: tuple(2 * one for one in gm(*args))\n"
    )
    (tmp_path / "a_backend.py").write_text(text.format("a_codegen"))
    (tmp_path / "a_codegen.py").write_text("import a_table\n")
    (tmp_path / "a_table.py").touch()
    source = "import torch\n\n\ndef run(p):\n    x = p.leaf('x', p.randn(1, requires_grad=True))\n    "
    source += "out = p.compile(lambda a: a.sin())(x)\n    p.value('v', out)\n"
    program, subject = (
        Program(Case("c", "n"), scaled, source=source),
        resolve(f"{tmp_path}/a_backend.py:wrong"),
    )
    path = write(Judged(program, subject, row(program.case, subject.name)), tmp_path / "out")
    words = path.read_text().replace(subject.name, "")
    assert str(tmp_path) not in words
    assert "Needs a_backend.py, a_codegen.py, a_table.py: beside this script, or in '..' from here." in words
    assert run(path, "check").returncode == 1
    (tmp_path / "a_table.py").rename(tmp_path / "out" / "a_table.py")
    assert run(path, "check").returncode == 1
    (tmp_path / "out" / "a_table.py").unlink()
    for words in ((), ("check",), ("--unittest",)):
        done = run(path, *words)
        assert (done.returncode, done.stderr) == (5, "could not run: No module named 'a_table'\n"), (
            done.stdout
        )
