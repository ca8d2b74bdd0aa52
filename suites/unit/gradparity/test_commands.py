"""The commands beside `run`: each does its work, says what it wrote, and exits as pytest would."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from gradparity.campaign import Campaign
from gradparity.cli import COMMANDS, app, demo, doctor
from gradparity.cli.progress import View, watching
from gradparity.store.store import Store
from gradparity.verdict import Row, Verdict

pytestmark = pytest.mark.programs

NAME = "autograd_function_db"
CASE, NETWORK = "demo::gradient_of_an_unused_output", "demo::hooks_of_a_small_network"
WRONG = """
def wrong(gm, inputs):
    return lambda *args: tuple(one * 1.5 for one in gm(*args))
"""
RUN = ("run", "-c", NAME, "-n", "0", "--device", "cpu", "--limit-per-corpus", "2")


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def _workers(in_this_process: None) -> None: ...


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A store with two runs of eager with a fault."""
    path = tmp_path_factory.mktemp("store") / "s.db"
    for subject in ("planted:none-grad", "planted:drop-event"):
        assert invoke(*RUN, "-s", subject, "--store", str(path)).exit_code in (0, 1)
    return path


def signature(store: Path) -> str:
    with Store(store) as opened:
        return next(row.signature for row in opened.rows() if row.is_find)


def test_every_command_has_help_with_an_example() -> None:
    for name in COMMANDS:
        result = invoke(name, "--help")
        assert result.exit_code == 0
        assert "gradparity " + name in result.stdout, name


def test_run_keeps_results_and_writes_all_files(tmp_path: Path) -> None:
    files = {"--json": "o.jsonl", "--junit": "o.xml", "--report": "o.html", "--store": "s.db"}
    words = [word for option, name in files.items() for word in (option, str(tmp_path / name))]
    assert invoke(*RUN, "-s", "planted:none-grad", *words).exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files.values())
    assert "planted:none-grad" in (tmp_path / "o.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shard", "5/2"), "not a shard"),
        (("--check", "luck"), "unknown check 'luck'"),
        (("--executor", "moon"), "unknown executor 'moon'"),
        (("--store", __file__), "is no store of gradparity"),
    ],
)
def test_usage_errors_of_run_are_one_line_and_4(words: tuple[str, ...], said: str) -> None:
    result = invoke(*RUN, "-s", "eager", *words)
    assert (result.exit_code, said in result.stderr) == (4, True), result.output


def test_a_file_that_cannot_be_written_is_3(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke(*RUN, "-s", "eager", "--json", str(tmp_path / "file" / "o.jsonl"))
    assert (result.exit_code, "cannot write" in result.stderr) == (3, True)


def test_ablation_and_checks_in_a_run() -> None:
    words = ("run", "-c", "demo", "-n", "0", "--device", "cpu", "--match", CASE)
    result = invoke(*words, "-s", "compile:aot_eager", "--ablate", "--fresh")
    assert (result.exit_code, "broken by aot_eager  grad-none" in result.stdout) == (0, True)
    assert invoke(*RUN, "-s", "eager", "--check", "metamorphic", "--check", "warnings").exit_code == 0


def test_report_shows_the_newest_run_and_the_trend(tmp_path: Path, store: Path) -> None:
    out = tmp_path / "report.html"
    result = invoke("report", str(store), "--out", str(out))
    assert result.exit_code == 0
    assert "planted:drop-event" in result.stdout
    assert '<section id="trend">' in out.read_text()


def test_merge_joins_stores_and_lines(tmp_path: Path, store: Path) -> None:
    lines = tmp_path / "o.jsonl"
    invoke("report", str(store), "--json", str(lines))
    result = invoke("merge", str(store), str(lines), "--out", str(tmp_path / "all.db"))
    assert (result.exit_code, "all.db: 6 rows" in result.stdout) == (0, True)
    assert invoke("merge", str(tmp_path / "none.db"), "--out", str(tmp_path / "all.db")).exit_code == 4


def test_replay_says_whether_finds_are_as_before(tmp_path: Path, store: Path) -> None:
    result = invoke("replay", str(store), "--device", "cpu")
    assert (result.exit_code, result.stdout.count("as before ")) == (0, 1)
    changed = tmp_path / "o.jsonl"
    with Store(store) as opened:
        row = next(row for row in opened.rows() if row.is_find).to_json()
    changed.write_text(
        json.dumps(row | {"subject": "eager"}) + "\n" + json.dumps(row | {"symptom": "other"}) + "\n"
    )
    result = invoke("replay", str(changed), "--all", "--device", "cpu")
    assert (result.exit_code, "1 gone, 1 changed" in result.stdout) == (1, True)
    changed.write_text("")
    assert invoke("replay", str(changed)).exit_code == 5


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("subject", "verdict", "symptom"),
    [("planted:exit", Verdict.CRASH, "crash"), ("planted:deaf-hang", Verdict.TIMEOUT, "timeout")],
)
def test_what_ends_its_process_ends_no_command(
    tmp_path: Path, subject: str, verdict: Verdict, symptom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # in a worker
    words = (f"{NAME}::MulGenVmapAutogradFunction::0", "-s", subject, "--device", "cpu", "--timeout", "1")
    if verdict is Verdict.CRASH:
        shown = invoke("show", *words)
        assert (shown.exit_code, f"CRASH        {subject}  " in shown.stdout) == (0, True), shown.stdout
        return
    lines = tmp_path / "o.jsonl"
    lines.write_text(json.dumps(Row(words[0], 0, NAME, subject, verdict, symptom).to_json()) + "\n")
    again = invoke("replay", str(lines), "--device", "cpu", "--timeout", "1")
    assert (again.exit_code, "1 as before" in again.stdout) == (0, True), again.stdout


def test_show_finds_a_signature_in_a_store(store: Path) -> None:
    result = invoke("show", signature(store), "--store", str(store), "--device", "cpu")
    assert (result.exit_code, "grad-none" in result.stdout) == (0, True)
    result = invoke("show", "ffff", "--store", str(store), "--device", "cpu")
    assert (result.exit_code, "unknown signature 'ffff'" in result.stderr) == (4, True)
    assert invoke("show", CASE).exit_code == 4


def test_show_takes_a_case_apart() -> None:
    result = invoke("show", CASE, "-s", "compile:aot_eager", "--device", "cpu", "--ablate")
    assert "broken by: aot_eager" in result.stdout
    assert "ablation: each stage in a run of its own, after the run above" in result.stdout


def test_a_draft_names_a_backends_file_without_its_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "wrong_backend.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    for where in ("cli.issue", "handover"):  # what a script says in a process of its own is the next test's
        monkeypatch.setattr(f"gradparity.{where}.said", lambda python, script: "differs: it was not run")
    result = invoke("issue", NETWORK, "-s", "wrong_backend.py", "--device", "cpu", "--seconds", "0")
    assert result.exit_code == 0, result.output
    (draft,) = tmp_path.glob("issue_*.md")
    assert str(tmp_path) not in draft.read_text()
    assert WRONG.strip() in draft.read_text()


def test_issue_writes_scripts_and_a_draft(tmp_path: Path) -> None:
    words = ("-s", "compile:aot_eager", "--device", "cpu", "--out", str(tmp_path), "--seconds", "3")
    result = invoke("issue", CASE, *words)
    assert (result.exit_code, "nothing was filed" in " ".join(result.stdout.split())) == (0, True), (
        result.stdout
    )
    draft, long, short = sorted(tmp_path.iterdir())
    assert [draft.suffix, long.name[:6], short.name[:6]] == [".md", "repro_", "short_"]
    assert short.read_text().strip() in draft.read_text()
    assert "First broken by: **aot_eager**" in draft.read_text()
    assert "(here) | differs: " in draft.read_text()
    assert invoke("issue", CASE, "-s", "eager", "--device", "cpu", "--out", str(tmp_path)).exit_code == 5


def test_sweep_of_a_script_that_is_not_there_is_4(tmp_path: Path) -> None:
    result = invoke("sweep", str(tmp_path / "none.py"))
    assert (result.exit_code, "no script at" in result.stderr, result.stdout) == (4, True, "")


def test_demo_shows_what_differs_and_writes_scripts_and_the_report(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "RUNS", demo.RUNS[3:4])
    result = invoke("demo", "--out", str(tmp_path))
    assert (result.exit_code, "1 of 1 programs differ from eager" in result.stdout) == (0, True), (
        result.stdout
    )
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html", ".py"]
    assert "no time left" in invoke("demo", "--out", str(tmp_path), "--budget", "0").stdout


def test_doctor_fails_if_what_is_necessary_does(monkeypatch) -> None:
    well = doctor.Examined("eager", True, True, "")
    monkeypatch.setattr(
        doctor, "EXAMINATIONS", (lambda: well, lambda: doctor.Examined("ray", False, False, ""))
    )
    assert invoke("doctor").exit_code == 0
    monkeypatch.setattr(doctor, "EXAMINATIONS", (lambda: doctor.Examined("eager", False, True, "why"),))
    result = invoke("doctor")
    assert (result.exit_code, "FAILS" in result.stdout) == (1, True)


def test_doctor_examines_eager() -> None:
    assert doctor.EXAMINATIONS[0]().works


def test_subjects_and_corpora_are_listed() -> None:
    assert "compile:<backend>" in invoke("subjects").stdout
    assert "folder:<path>" in invoke("corpora").stdout


class TestProgress:
    ROW = Row("c::b", 0, "c", "s", Verdict.DIVERGE, "values", "why")

    def campaign(self, *ended: str) -> Campaign:
        made = Campaign(rows=[self.ROW], found=[self.ROW], total=4, ended={*ended})
        made.verdicts[self.ROW.verdict] += 1
        return made

    def test_a_campaign_tells_counts_and_the_time_left(self) -> None:
        assert self.campaign().describe() == "0/4 units; 1 cases: 1 DIVERGE; 1 divergences"
        campaign = self.campaign("s c::b")
        campaign.began -= 10
        assert campaign.describe().startswith("1/4 units, about 30 s left; ")

    def test_plain_lines_come_now_and_then(self) -> None:
        console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
        campaign = self.campaign()
        View(console, every=60.0)(campaign)
        View(console, every=0.0)(campaign)
        assert console.export_text().splitlines() == [campaign.describe()]

    def test_a_terminal_gets_a_bar_and_the_last_finds(self) -> None:
        console = Console(record=True, width=120, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
        with watching(console) as view:
            view(self.campaign("s c::b"))
            shown = view._live.get_renderable()
        with console.capture() as captured:
            console.print(shown)
        assert "1/4" in captured.get()
        assert "c::b" in captured.get()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("gradparity fu", "fuzz"),
        ("gradparity fuzz --policy muta", "mutation"),
        ("gradparity run --subject compile:aot", "compile:aot_eager"),
        ("gradparity show x -s retrograd-live:e", "retrograd-live:eager"),
        ("gradparity run --corpus thr", "threads"),
        ("gradparity run --check reco", "recompiles"),
        ("gradparity run --device cu", "cuda"),
    ],
)
def test_the_shell_completes_commands_options_and_values(line: str, wanted: str) -> None:
    env = {
        "_GRADPARITY_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    result = CliRunner().invoke(app, [], prog_name="gradparity", env=env)
    assert result.output.split() == [wanted]
