"""Settings in a file: what it may say, what wins, what is told of a slip."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest
import typer

from outrider import cli
from outrider.commands import config, configfile
from outrider.commands.config import SECTIONS, Section
from outrider.commands.configfile import load, settings
from outrider.commands.edge import edge

FULL = """
[cloud]
listen = "127.0.0.1:9"
slots = 3
tenant-stretch = 1
deterministic = false
token-file = "tokens"

[edge]
cloud = "ws://127.0.0.1:9"
model-name = ["a", "b"]
schedule = "sync"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "tokens").write_text("me:secret\n")
    (tmp_path / "tokens").chmod(0o600)
    made = tmp_path / "outrider.toml"
    made.write_text(FULL)
    return made


def shown(section: str, *more: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.run(["config", "show", section, *more]) == 0
    return capsys.readouterr().out


def test_sections_are_the_commands_that_take_a_file():
    assert [section.value for section in Section] == list(SECTIONS)
    for name, command in typer.main.get_command(cli.app).commands.items():
        takes = any("--config" in option.opts for option in command.params)
        assert takes == (name in SECTIONS), name


@pytest.mark.parametrize("section", SECTIONS)
def test_keys_and_defaults_are_the_options_own(section: str, capsys: pytest.CaptureFixture[str]):
    """There is no second place for them: the file that is shown is the command's signature."""
    text = shown(section, capsys=capsys)
    whole = text.replace("\n# ", "\n")
    lines = [line for line in whole.splitlines() if not line.endswith(("not set", "must be given"))]
    values = tomllib.loads("\n".join(lines))[section]
    parameters = inspect.signature(SECTIONS[section]).parameters
    for name, value in values.items():
        assert parameters[name.replace("-", "_")].default == value
    options = typer.main.get_command(cli.app).commands[section].params
    named = {option.opts[0].removeprefix("--") for option in options}
    assert {setting.name for setting in settings(SECTIONS[section]).values()} == named - {
        "config", "until-eof", "help"
    }  # fmt: skip
    assert set(tomllib.loads(text)) == {section}


def test_a_file_gives_defaults_and_the_command_line_wins(file: Path):
    made = typer.main.get_command(cli.app).commands["cloud"]
    context = made.make_context("cloud", ["--config", str(file), "--slots", "5"])
    assert context.params["slots"] == 5
    assert context.params["listen"] == "127.0.0.1:9"
    assert context.params["deterministic"] is False
    assert context.params["tenant_stretch"] == 1.0
    assert context.params["token_file"] == file.parent / "tokens", "relative to the file"
    context = made.make_context("cloud", ["--slots", "5", "--config", str(file)])
    assert context.params["slots"] == 5
    made = typer.main.get_command(cli.app).commands["edge"]
    context = made.make_context("edge", ["--config", str(file)])
    assert context.params["cloud"] == "ws://127.0.0.1:9", "a required option, from the file"
    assert context.params["model_name"] == ["a", "b"]
    assert context.params["schedule"] == "sync"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[cloud]\nslot = 3\n", "line 2: [cloud] has no slot: did you mean slots?"),
        ("[cloud]\ntoken_file = 'x'\n", "line 2: [cloud] has no token_file: did you mean token-fi"),
        ("[clod]\nslots = 3\n", "line 1: no section [clod]: did you mean cloud?"),
        ("\n\n[cloud]\n\nslots = '3'\n", "line 5: slots is a whole number"),
        ("[cloud]\nslots = true\n", "line 2: slots is a whole number"),
        ("[cloud]\ninsecure = 1\n", "line 2: insecure is true or false"),
        ("[cloud]\nslots = 0\n", "line 2: slots: "),
        ("[edge]\nschedule = 'fast'\n", "line 2: schedule: "),
        ("[edge]\nmodel-name = 'a'\n", "line 2: model-name is a list of strings"),
        ("[cloud]\ntls-key = 'nowhere'\n", "line 2: tls-key: file '"),
        ("slots = 3\n", "line 1: no section [slots]"),
        ("cloud = 3\n", "line 1: [cloud] is a section, not a value"),
        ("[cloud\n", "not TOML"),
    ],
)
def test_a_slip_is_named_with_its_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "f.toml"
    file.write_text(text)
    assert cli.run(["config", "check", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"error: {file}: {said}" in err


def test_a_start_with_a_wrong_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "f.toml"
    file.write_text("[serve]\nslots = 3\n[edge]\nxyz = 1\n")
    assert cli.run(["serve", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert said == f"error: --config: {file} line 2: [serve] has no slots: {said.split(': ', 4)[4]}"
    assert load(file, "cloud", SECTIONS["cloud"]) == {}, "other sections are others' business"


def test_what_can_be_used_and_who_can_read_it(file: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["config", "check", str(file)]) == 0
    assert capsys.readouterr() == (f"{file}: can be used\n", "")
    (file.parent / "tokens").chmod(0o644)
    assert cli.run(["config", "check", str(file)]) == 0
    assert "warning: " in (said := capsys.readouterr().err)
    assert "line 7: token-file: others can read tokens: chmod 600 tokens" in said
    text = shown("cloud", "--config", str(file), capsys=capsys)
    assert "\nslots = 3\n" in text
    assert f'\ntoken-file = "{file.parent / "tokens"}"\n' in text
    assert '\n# model = "builtin:smollm2"\n' in text


def test_every_kind_of_setting_has_its_words():
    kinds = {setting.wants for setting in settings(edge).values()}
    assert kinds == {
        "true or false", "a whole number", "a number", "a string", "a list of strings"
    }  # fmt: skip
    assert config.SECTIONS["edge"] is edge
    assert configfile.SECRETS
