"""`gradparity show`: both timelines side by side; the first difference is visible in plain text."""

import torch
from rich.console import Console

from gradparity.differential import compare
from gradparity.oracles.differences import first_differing_call
from gradparity.subjects.registry import resolve
from gradparity.timeline import error_table, timelines
from gradparity.verdict import Verdict

CPU = torch.device("cpu")


def shown(table) -> list[str]:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text().splitlines()


def test_the_first_differing_call_is_marked(bench, hooked_body) -> None:
    found = compare(bench.program(hooked_body), resolve("planted:swap-hooks"), CPU)
    assert first_differing_call(found.evidence) == 0
    lines = shown(timelines(found))
    assert [line for line in lines if ">>" in line and "tensor z" in line and "tensor y" in line]
    assert sum(">>" in line for line in lines) == 1


def test_nothing_is_marked_where_all_agree(bench, hooked_body) -> None:
    found = compare(bench.program(hooked_body), resolve("eager"), CPU)
    assert first_differing_call(found.evidence) is None
    assert ">>" not in "\n".join(shown(timelines(found)) + shown(error_table(found)))


def test_a_missing_call_is_a_difference(bench, hooked_body) -> None:
    found = compare(bench.program(hooked_body), resolve("planted:drop-event"), CPU)
    assert first_differing_call(found.evidence) == 1


def test_the_error_table_marks_wrong_gradients(bench, hooked_body) -> None:
    for fault, word in (("scale-grad", "DIVERGE"), ("none-grad", "different")):
        lines = shown(error_table(compare(bench.program(hooked_body), resolve(f"planted:{fault}"), CPU)))
        assert [line for line in lines if ">>" in line and "grad x" in line and word in line]
        assert not [line for line in lines if ">>" in line and "grad w" in line]


def test_of_a_case_that_eager_does_not_repeat_the_tables_show_eager_twice(bench) -> None:
    numbers = iter(range(100))
    found = compare(bench.program(lambda p: p.value("count", next(numbers))), resolve("planted:exit"), CPU)
    assert (found.row.verdict, found.beside) == (Verdict.NONDETERMINISTIC, "eager, run again")
    assert [line for line in shown(error_table(found)) if "eager 0, eager, run again 1" in line]


def test_a_program_without_hooks_has_no_timeline(bench) -> None:
    found = compare(bench.program(lambda p: p.value("one", 1)), resolve("eager"), CPU)
    assert timelines(found) is None
