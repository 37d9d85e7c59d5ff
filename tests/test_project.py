"""Promises of the project as a whole: what is imported when, what docs show, what is pinned."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from outrider.cli import app

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = sorted(typer.main.get_command(app).commands)

WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
heavy = {"torch", "transformers", "tokenizers", "safetensors", "gguf", "accelerate"}
PathFinder.find_spec = lambda name, *rest: None if name in heavy else find(name, *rest)
"""
"""As if the extra `torch` were not installed."""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_no_two_test_files_have_one_name():
    """Without packages pytest imports the first for both."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


# -- imports ----------------------------------------------------------------------------------


def test_every_help_works_without_torch():
    done = python(
        WITHOUT_TORCH + "from outrider.cli import run\n"
        f"for words in [[], ['--version'], *[[c, '--help'] for c in {COMMANDS!r}]]:\n"
        "    assert run(words) == 0, words\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_generate_without_torch_names_the_extra():
    done = python(
        WITHOUT_TORCH + "from outrider.cli import run\n"
        "sys.exit(run(['generate', 'hi', '--max-tokens', '1']))\n"
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: .*outrider\[torch\].*\n", done.stderr), done.stderr


def test_help_imports_no_engine_and_no_link():
    done = python(
        "import sys\nfrom outrider.cli import run\nrun(['generate', '--help'])\n"
        "link = {'websockets', 'outrider.session.client'}\n"
        "heavy = {'torch', 'transformers', 'tokenizers', *link} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    assert done.returncode == 0, done.stderr


# -- no code from data ------------------------------------------------------------------------

UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def unsafe(tree: ast.AST) -> list[str]:
    """Every way in which a file could run code that came as data."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [n.name for n in names if n.name.split(".")[0] in UNSAFE_MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in UNSAFE_MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=name)) if name in UNSAFE_CALLS:
                found.append(f"{name}(")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                safe = any(
                    k.arg == "weights_only" and getattr(k.value, "value", None) is True
                    for k in node.keywords
                )
                found += [] if safe else ["torch.load("]
            case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                found.append("trust_remote_code=True")
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                found.append("shell=True")
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "eval(x)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "load(x, trust_remote_code=True)",
    ],
)
def test_the_check_below_can_fail(code: str):
    assert unsafe(ast.parse(code))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_in_the_package_runs_code_from_data(path: Path):
    """Field case 29."""
    assert unsafe(ast.parse(path.read_text(encoding="utf-8"))) == []


# -- what the documents show ------------------------------------------------------------------


def shown_commands(text: str) -> list[list[str]]:
    """The `outrider ...` and `make ...` lines of fenced blocks, `$ ` and comments removed."""
    found = []
    for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.removeprefix("$ ")
            if words.startswith(("outrider ", "make ")):
                found.append(split(words))
    return found


def split(line: str) -> list[str]:
    """A shell line's words, without comment, pipe and redirection."""
    return shlex.split(re.split(r"\s[|<>]\s", line)[0], comments=True)


SHOWN = [(doc.name, words) for doc in DOCS for words in shown_commands(doc.read_text("utf-8"))]
TREE = typer.main.get_command(app)
HELP_EXAMPLES = [
    (name, split(line))
    for name, command in TREE.commands.items()
    for line in (command.help or "").splitlines()
    if line.strip().startswith("outrider ")
]


def test_the_readme_shows_the_two_commands():
    words = [words for name, words in SHOWN if name == "README.md"]
    assert ["make", "demo"] in words
    assert ["make", "test"] in words


@pytest.mark.parametrize(("where", "words"), SHOWN + HELP_EXAMPLES, ids=lambda v: str(v)[:60])
def test_every_command_shown_exists_with_its_options(
    where: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
        assert {w for w in words[1:] if "=" not in w} <= targets, where
        return
    if words[1].startswith("-"):
        TREE.make_context("outrider", words[1:], resilient_parsing=True)
        return
    command = TREE.commands[words[1]]
    monkeypatch.chdir(tmp_path)  # some options want files that exist
    for word in words[2:]:
        if re.fullmatch(r"[a-z][\w.]*", word):
            (tmp_path / word).touch()
    command.make_context(words[1], words[2:])  # raises on an unknown option or a bad value


@pytest.mark.parametrize("doc", DOCS, ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(doc: Path):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", doc.read_text("utf-8"))
    assert [link for link in links if not (doc.parent / link).exists()] == []


def test_the_architecture_page_names_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    folders = {path.parent.name for path in (ROOT / "src" / "outrider").glob("*/__init__.py")}
    table = set(re.findall(r"`([a-z]+)`", "".join(re.findall(r"^\|[^|]+\|", text, re.M))))
    assert folders - table == set()


def test_every_invariant_cited_is_on_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    stated = re.findall(r"^\* \*\*(I\d+)\*\* ", page, re.M)
    assert stated == [f"I{n}" for n in range(1, 11)]
    cited = {n for path in SOURCES for n in re.findall(r"\bI\d+\b", path.read_text("utf-8"))}
    assert len(cited) > 5
    assert cited <= set(stated)


def test_every_measurement_is_listed_and_make_bench_runs_those_without_data():
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    runs, asks = page.split("These ask real questions")
    by_make = re.search(r"^BENCH \?= (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert by_make
    assert re.findall(r"^\| `(\w+)\.py`", runs, re.M) == by_make[1].split()
    listed = {*by_make[1].split(), *re.findall(r"^\| `(\w+)\.py`", asks, re.M), "prompts"}
    assert listed == {path.stem for path in (ROOT / "bench").glob("*.py")}


def test_the_documents_state_the_patience_of_the_code():
    from outrider.commands.remote import PATIENCE_S
    from outrider.session.client import GIVE_UP_AFTER

    for name in ("README.md", "docs/protocol.md"):
        text = " ".join((ROOT / name).read_text("utf-8").split())
        assert re.search(rf"waits (?:only )?{PATIENCE_S:g} s for a", text), name
        assert f"{GIVE_UP_AFTER:g} s" in text, name


def test_nothing_cites_a_page_that_a_clone_has_not():
    """`docs/name.md` in source, tests and documents leads somewhere; private notes do not."""
    here = Path(__file__)
    for path in (*SOURCES, *DOCS, *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").glob("*.py")):
        text = "" if path == here else path.read_text("utf-8")
        assert not re.findall(r"\b(?:SYSTEM|PAPERS|STYLE|LAYOUT)(?:\.md)?\b", text), path
        named = set(re.findall(r"\bdocs/\w+\.md", text))
        assert {name for name in named if not (ROOT / name).is_file()} == set(), path


# -- packaging --------------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s<>=!~;\[]", line)[0].lower() for line in requirements}


def pinned(file: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / file).read_text("utf-8").splitlines()
    return {line.split("==")[0]: line for line in lines if line and not line.startswith("#")}


def test_the_base_install_is_small():
    assert names(PROJECT["dependencies"]) == {"numpy", "typer", "rich", "msgspec", "websockets"}


def test_every_dependency_names_its_reason():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = re.findall(r'^ +"[a-z0-9-]+[><=].*$', text, re.MULTILINE)
    assert len(listed) > 10
    assert [line for line in listed if "#" not in line] == []


def test_pins_cover_the_project_and_hold_no_address():
    extras = PROJECT["optional-dependencies"]
    wanted = names(PROJECT["dependencies"]).union(*map(names, extras.values())) - {"outrider"}
    wanted -= {"llama-cpp-python"}  # compiled where it is installed: minutes, so not for every run
    wanted -= {"ray"}  # 500 MB, and of use only for more than one verifier
    wanted -= {"playwright"}  # 50 MB, and of use only beside a browser
    dev, torch = pinned("dev.txt"), pinned("torch.txt")
    assert wanted <= set(dev) | set(torch)
    assert names(PROJECT["dependencies"]) <= set(pinned("base.txt"))
    for file in (ROOT / "requirements").iterdir():
        text = file.read_text("utf-8")
        assert re.findall(r"://|file:|/[a-z]+/|--\w|\+cpu|@", text) == [], file.name


def test_torch_is_pinned_without_a_build_tag():
    assert list(pinned("torch.txt").values()) == ["torch==2.13.0"]
    assert "torch" not in pinned("dev.txt")


def test_the_version_stands_in_one_place():
    done = subprocess.run(
        [sys.executable, "-m", "outrider", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"outrider {PROJECT['version']}\n"
    for path in SOURCES:
        assert PROJECT["version"] not in path.read_text("utf-8"), path


def test_field_cases_name_tests_that_exist():
    """Forty rows, and no row outlives its tests."""
    page = (ROOT / "tests" / "FIELD_CASES.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d\d) \|(.*)\|$", page, re.MULTILINE)
    assert [number for number, _ in rows] == [f"{n:02}" for n in range(1, 41)]
    for number, row in rows:
        path = ""
        named = re.findall(r"`([\w/.]*)::(\w+)`", row)
        assert named or "not yet" in row, number
        for file, test in named:
            path = file or path
            text = (ROOT / "tests" / path).read_text(encoding="utf-8")
            assert re.search(rf"^(?:async )?def {test}\(", text, re.MULTILINE), (number, test)
