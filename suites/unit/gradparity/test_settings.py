"""[tool.gradparity]: what a project sets, checked; an option goes before it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradparity.cli import app
from gradparity.errors import SettingsError
from gradparity.settings import Settings, load


def project(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_the_nearest_file_with_the_table_counts(tmp_path: Path) -> None:
    project(tmp_path, '[tool.gradparity]\nsubjects = ["eager"]\nstore = "out/s.db"\n')
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    project(tmp_path / "a", "[tool.other]\n")
    found = load(inner)
    assert (found.subjects, found.store) == (["eager"], tmp_path / "out" / "s.db")


def test_nothing_is_set_without_a_file(tmp_path: Path) -> None:
    assert load(tmp_path) == Settings()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("colour = 1", "colour"),
        ('device = "tpu"', "device"),
        ("processes = -1", "processes"),
        ("= 3", "cannot read"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load(project(tmp_path, f"[tool.gradparity]\n{line}\n"))


def test_commands_take_them_and_options_go_before(tmp_path: Path, monkeypatch) -> None:
    table = (
        'subjects = ["eager"]\ncorpora = ["autograd_function_db"]\nprocesses = 0\ndevice = "cpu"\nseed = 5\n'
    )
    monkeypatch.chdir(project(tmp_path, f"[tool.gradparity]\n{table}"))
    result = CliRunner().invoke(app, ["run", "--limit-per-corpus", "1"])
    assert (result.exit_code, "seed 5, 0 processes" in result.stdout) == (0, True)
    result = CliRunner().invoke(app, ["run", "--limit-per-corpus", "1", "--seed", "6"])
    assert "seed 6" in result.stdout


def test_a_bad_setting_is_a_usage_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(project(tmp_path, "[tool.gradparity]\ncolour = 1\n"))
    assert CliRunner().invoke(app, ["subjects"]).exit_code == 4


@pytest.mark.parametrize(("subjects", "code"), [('"eager"', 0), ('"eager", "planted:none-grad"', 4)])
def test_a_command_with_one_subject_takes_the_only_one_that_is_set(
    tmp_path: Path, monkeypatch, subjects: str, code: int
) -> None:
    project(tmp_path, f'[tool.gradparity]\nsubjects = [{subjects}]\nprocesses = 0\ndevice = "cpu"\n')
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["fuzz", "--cases", "1", "--policy", "elementwise"])
    assert result.exit_code == code, result.output
