"""Conformance: levels, what a planted backend fails, the file, the badge, the comparison of two runs."""

import functools
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner
from typer.testing import Result as Ran

from gradparity.campaign import Campaign
from gradparity.cli import app
from gradparity.cli.conform import print_conformance
from gradparity.conform import run as conform_run
from gradparity.conform.badge import badge
from gradparity.conform.compare import changed
from gradparity.conform.levels import (
    LEVELS,
    MOST_SCENARIOS,
    level_of_case,
    level_of_symptom,
    places,
    spread,
)
from gradparity.conform.outcome import FAILED, PASSED, STOCKS, Conformance, Result, read
from gradparity.conform.run import minutes_for_all
from gradparity.corpus.registry import corpus
from gradparity.verdict import Row, Verdict

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("conform")]

CHOSEN = [
    ("op_db", "sin"),
    ("scenarios", "aot_accumulates_into_a_given_gradient"),
    ("scenarios", "aot_one_tensor_twice"),
    ("scenarios", "compiled_none_to_a_hooked_leaf"),
    ("scenarios", "aot_number_computed_from_another"),
    ("scenarios", "aot_sums_with_hooks_on_every_leaf"),
]
"""At least one case of each level; stock's aot_eager calls the hooks of the last in another order."""

BACKENDS = """
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager


def plain(gm, inputs):
    return make_boxed_func(gm.forward)


def larger(gm, inputs):
    return make_boxed_func(lambda *args: [one if one is None else one * 1.01 for one in gm(*args)])


scaled = aot_autograd(fw_compiler=plain, bw_compiler=larger)


def wrong(gm, inputs):
    return lambda *args: tuple(one * 1.01 for one in gm(*args))


def hookless(gm, inputs):
    compiled = aot_eager(gm, inputs)

    def run(*args):
        for one in args:
            if isinstance(one, torch.Tensor):
                one._backward_hooks = None
        return compiled(*args)

    return run


def large(graph, inputs):
    def run(*args):
        torch.empty(1 << 20)
        return graph(*args)

    return run
"""


def begin(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes it a working folder with two wrong backends; few cases are chosen."""
    (folder / "planted_backends.py").write_text(BACKENDS)
    patch.chdir(folder)
    patch.setattr(conform_run, "places", lambda: CHOSEN)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    begin(tmp_path, monkeypatch)
    return tmp_path


Run = tuple[Ran, Conformance, Path]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The one run of a backend that all tests read: what it said, what it found, and its folder."""

    @functools.cache
    def once(backend: str) -> Run:
        folder = tmp_path_factory.mktemp("conform")
        with pytest.MonkeyPatch.context() as patch:
            begin(folder, patch)
            return *judged(backend, "out", "--report", "out.html"), folder

    return once


def conform(*words: str) -> Ran:
    return CliRunner().invoke(app, ["conform", *words], env={"COLUMNS": "150"})


def judged(backend: str, out: str, *words: str) -> tuple[Ran, Conformance]:
    result = conform("-b", backend, "-n", "0", "--device", "cpu", "--out", out, *words)
    return result, read(Path(out) / "conformance.json")


def failed(found: Conformance) -> dict[int, int]:
    """By level, how many cases fail; only levels with failures."""
    return {level: n for level in range(len(LEVELS)) if (n := found.count(level)["failed"])}


def test_gradients_that_are_one_percent_too_large_fail_level_1(run_of: Callable[[str], Run]) -> None:
    result, found, _ = run_of("planted_backends.py:scaled")
    assert (result.exit_code, found.reached) == (1, 0), result.output
    assert found.count(0) == {"passed": 1}
    assert failed(found)[1] == 2
    assert "grad-values  op_db::sin::0" in result.stdout
    assert "reaches level 0 of 4" in result.stdout


def test_wrong_values_fail_level_0_beside_the_gradients_that_they_make_wrong(home: Path) -> None:
    result, found = judged("planted_backends.py:wrong", "out")
    assert (result.exit_code, found.reached) == (1, -1), result.output
    assert found.count(0) == {"failed": 1}
    symptoms = {item.level: item.symptom for item in found.results if item.case == "op_db::sin::0"}
    assert symptoms == {0: "values", 1: "grad-values"}


def test_the_html_page_shows_the_levels(run_of: Callable[[str], Run]) -> None:
    _, found, folder = run_of("planted_backends.py:scaled")
    levels = (
        (folder / "out.html").read_text().partition('<section id="levels">')[2].partition("</section>")[0]
    )
    assert found.describe() in levels
    lines = [re.findall("<td>(.*?)</td>", line) for line in re.findall("<tr.*?</tr>", levels)[1:]]
    assert [line[0] for line in lines] == [str(number) for number in range(len(LEVELS))]
    assert lines[1][3] == str(found.count(1)[FAILED]) != "0"
    assert re.search('<tr class="DIVERGE"><td>1</td>', levels)


def test_dropped_hooks_fail_level_3_only(home: Path) -> None:
    result, found = judged("planted_backends:hookless", "out")
    assert (result.exit_code, failed(found), found.reached) == (1, {3: 1}, 2), result.output
    assert found.count(3)["stock's own"] == 1
    assert "hook-count  scenarios::compiled_none_to_a_hooked_leaf" in result.stdout


def test_a_stage_of_stock_passes_what_it_passes(home: Path, run_of: Callable[[str], Run]) -> None:
    result, found, _ = run_of("aot_eager")
    assert (result.exit_code, failed(found), found.reached) == (0, {}, 4), result.output
    assert [found.count(level) for level in range(5)] == [
        {"passed": 1},
        {"passed": 2},
        {"passed": 1},
        {"passed": 1, "stock's own": 1},
        {"passed": 1},
    ]
    strict, found = judged("aot_eager", "out", "--strict")
    assert (strict.exit_code, failed(found), found.reached) == (1, {3: 1}, 2)


def test_what_a_case_costs_is_a_remark(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conform_run, "places", lambda: CHOSEN[:1])
    result, found = judged("planted_backends.py:large", "out", "--check", "memory")
    assert (result.exit_code, failed(found)) == (5, {}), result.output
    assert {item.verdict for item in found.results} == {"MEMORY"}
    assert "remark: MEMORY in" in result.stdout


def test_two_runs_write_the_same_file_and_differ_in_nothing(home: Path, run_of: Callable[[str], Run]) -> None:
    shutil.copytree(run_of("planted_backends.py:scaled")[2] / "out", "one")
    judged("planted_backends.py:scaled", "two")
    texts = [Path(out, "conformance.json").read_text() for out in ("one", "two")]
    assert texts[0] == texts[1]
    head = json.loads(texts[0])
    assert (head["reached"], head["backend"], head["cases"]) == (0, "planted_backends.py:scaled", 6)
    assert head["versions"]["torch"]
    result = conform("--compare", "one/conformance.json", "two/conformance.json")
    assert (result.exit_code, "fails now: 0" in result.stdout) == (0, True)


def test_a_comparison_shows_what_broke_and_what_is_mended(run_of: Callable[[str], Run]) -> None:
    wrong, right = (run_of(backend)[2] for backend in ("planted_backends.py:scaled", "aot_eager"))
    files = [f"{folder}/out/conformance.json" for folder in (right, wrong)]
    result = conform("--compare", *files)
    assert (result.exit_code, "level reached: 4 → 0" in result.stdout) == (1, True)
    assert "fails now: 6" in result.stdout
    assert "  op_db::sin::0  grad-values" in result.stdout
    result = conform("--compare", *reversed(files))
    assert (result.exit_code, "level reached: 0 → 4" in result.stdout) == (0, True)
    assert "mended: 6" in result.stdout


def test_an_expected_file_works_for_every_backend(home: Path) -> None:
    entry = 'subject = "compile:*"\ncase = "*"\nverdict = "{}"\nreason = "r"\nlink = "l"\ndate = "d"\n'
    Path("known.toml").write_text("[[expected]]\n" + entry.format("HOOK_ORDER"))
    result, found = judged("planted_backends.py:hookless", "out", "--expected", "known.toml")
    assert (result.exit_code, failed(found), found.count(3)["expected"]) == (0, {}, 2), result.output
    entry = entry.replace('"compile:*"', '"eager"').replace('"*"', '"op_db::sin::0"')
    Path("known.toml").write_text("[[expected]]\n" + entry.format("DIVERGE"))
    result, _ = judged("compile:eager", "out", "--expected", "known.toml")
    assert (
        result.exit_code,
        "stale entry, nothing is so any more: DIVERGE eager op_db" in result.stdout,
    ) == (1, True)


def test_what_had_no_time_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, found = judged("eager", "out", "--minutes", "0.1")
    assert (result.exit_code, found.planned, found.cases) == (5, 6, 1)
    assert "incomplete: 1 of 6 cases; 5 had no time" in result.stdout
    assert "no level is claimed; in these, nothing fails up to level 1." in result.stdout
    assert re.search(
        r"nothing can be said of levels 2, 3, 4: .*\nall cases need about [12] minutes: --minutes [12]\n",
        result.stdout,
    )
    assert not json.loads(Path("out", "conformance.json").read_text())["complete"]
    assert ">incomplete: 1 of 6 cases, 0 failed<" in Path("out", "conformance.svg").read_text()


def test_a_backend_that_had_no_time_is_told_that_nothing_was_judged(home: Path) -> None:
    nothing = Conformance("b", {"torch": "2.13.0+cpu"}, "cpu", "own", 6)
    shown = Console(file=StringIO(), width=150)
    print_conformance(shown, nothing, None)
    text = shown.file.getvalue()
    assert "incomplete: 0 of 6 cases; 6 had no time. Of b no level is claimed; no level passes.\n" in text
    assert "nothing can be said of levels 0, 1, 2, 3, 4: " in text
    assert text.endswith("give it more time: --minutes\n")


def test_a_comparison_fails_for_a_lost_level_and_for_a_case_that_no_longer_agrees(home: Path) -> None:
    passed, aside = Result("op_db::sin::0", 0, "passed", "AGREE"), Result("op_db::sin::0", 0, "set aside", "")
    one, two, none = (Conformance("b", {}, "cpu", "own", 1, results) for results in ((passed,), (aside,), ()))
    assert (changed(one, one).is_loss, changed(two, one).is_loss) == (False, False)
    assert (changed(one, two).unlike, changed(one, two).is_loss) == ((aside,), True)
    assert (changed(one, none).unlike, changed(one, none).is_loss) == ((), True)
    Path("none.json").write_text(none.text())
    Path("one.json").write_text(one.text())
    result = conform("--compare", "one.json", "none.json")
    assert (result.exit_code, "level reached: 0 → incomplete, none" in result.stdout) == (1, True)


def test_the_time_for_all_cases_is_that_of_the_cases_that_ran() -> None:
    rows = [Row("op_db::sin::0", 0, "op_db", "compile:b", Verdict.AGREE)] * 2
    campaign = Campaign(rows, total=100, began=time.monotonic() - 6)
    assert minutes_for_all(campaign) == 6  # 3 s for each case, and the margin: 320 s
    assert minutes_for_all(Campaign(total=100)) is None


def test_the_time_left_is_never_more_than_there_are_minutes() -> None:
    now = time.monotonic()
    campaign = Campaign(total=1000, ended={"one"}, began=now - 60, until=now + 100)
    assert re.match(r"1/1000 units, about (99|100) s left; ", campaign.describe())
    campaign.total = 2
    assert re.match(r"1/2 units, about 60 s left; ", campaign.describe())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-b", "inductr"), "did you mean  inductor"),
        (("-b", "none.py:f"), "there is no file none.py"),
        ((), "name a --backend"),
        (("--compare", "none.json", "none.json"), "cannot read none.json"),
        (("--compare", "planted_backends.py", "planted_backends.py"), "is no conformance run"),
    ],
)
def test_usage_errors_are_one_line_and_4(home: Path, words: tuple[str, ...], said: str) -> None:
    result = conform(*words)
    assert (result.exit_code, said in result.stderr) == (4, True), result.output


def test_the_cases_are_spread_evenly_over_levels_and_corpora() -> None:
    chosen = places()
    assert len(set(chosen)) == len(chosen) == len(places())
    known = {name: set(corpus(name).chunks()) for name, _ in chosen}
    assert all(chunk in known[name] for name, chunk in chosen)
    first = Counter(level_of_case("::".join(place)) for place in chosen[:250])
    assert first == dict.fromkeys(range(5), 50)
    whole = Counter(level_of_case("::".join(place)) for place in chosen)
    assert min(whole.values()) > 100
    assert whole[4] <= MOST_SCENARIOS
    assert spread(list(range(10))) == [0, 8, 4, 2, 6, 1, 9, 5, 3, 7]
    assert (spread([]), spread([7])) == ([], [7])


@pytest.mark.parametrize(
    ("symptom", "case", "level"),
    [
        ("values", "op_db::sin::0", 0),
        ("raises RuntimeError", "op_db::sin::0", 0),
        ("grad-values", "op_db::sin::0", 1),
        ("grad-strides", "op_db::sin::0", 2),
        ("random-state", "op_db::dropout::0", 2),
        ("hook-order", "scenarios::aot_number_computed_from_another", 3),
        ("grad-values", "scenarios::compiled_none_to_a_hooked_leaf", 3),
        ("grad-values", "scenarios::aot_number_computed_from_another", 4),
        ("grad-none", "scenarios::aot_accumulates_into_a_given_gradient", 1),
    ],
)
def test_a_divergence_counts_at_the_level_that_it_belongs_to(symptom: str, case: str, level: int) -> None:
    assert level_of_symptom(symptom, case) == level


def test_the_badge_says_the_level_and_the_version(run_of: Callable[[str], Run]) -> None:
    for backend, said in (("aot_eager", "level 4 of 4"), ("planted:scale-grad", "level 0 of 4")):
        root = ElementTree.fromstring((run_of(backend)[2] / "out" / "conformance.svg").read_text())
        label, text = [item.text for item in root.iter("{http://www.w3.org/2000/svg}text")]
        assert label.startswith("gradparity, torch 2.")
        assert text == said
    nothing = Conformance("b", {"torch": "2.13.0+cpu"}, "cpu", "own", 0)
    assert "0 of 0 at level 0" in badge(nothing)


PUBLISHED = Path(__file__).parents[3] / "suites" / "parity" / "conformance"
PAGE = PUBLISHED.parents[2] / "docs" / "conformance.md"


def published(name: str, found: Conformance) -> str:
    """A row of the table of the page: at each level, what passed, failed, and is stock's own."""
    counts = [found.count(level) for level in range(len(LEVELS))]
    cells = [" / ".join(str(count[name]) for name in (PASSED, FAILED, STOCKS)) for count in counts]
    return " | ".join([f"| {name}", str(found.cases), *cells]) + " |"


@pytest.mark.parametrize("file", sorted(PUBLISHED.glob("*.json")), ids=lambda path: path.stem)
def test_the_page_says_what_was_measured(file: Path) -> None:
    assert published(f"`{file.stem}`", read(file)) in PAGE.read_text().splitlines()
