"""Data sets from a hub of our own: the hub's real client over HTTP, and Parquet as published."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from outrider.bench import hub
from outrider.bench.questions import QuestionError, load, pinned
from outrider.bench.scoring import score

pytest.importorskip("huggingface_hub", reason="the extra data is not installed")
pa = pytest.importorskip("pyarrow", reason="the extra data is not installed")

OLD, NEW = "a" * 40, "b" * 40
"""Commits; NEW is main."""


def gsm8k(count: int, said: str) -> list[dict[str, Any]]:
    """Rows 0 to 999 were trained on and must not be asked."""
    return [
        {"question": f"{said} {i}?", "answer": f"It is <<{i}=1>>.\n#### 1,{i % 1000:03}"}
        for i in range(count)
    ]


def mmlu() -> list[dict[str, Any]]:
    """Three subjects, not in order; 100 rows each."""
    return [
        {"question": f" {s} {i}? ", "subject": s, "choices": ["w", "x", "y", "z"], "answer": i % 4}
        for s in ("virology", "astronomy", "law")
        for i in range(100)
    ]


PUBLISHED: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {
    ("openai/gsm8k", NEW): {"main/test-00000-of-00001.parquet": gsm8k(1004, "new")},
    ("openai/gsm8k", OLD): {
        "main/test-00000-of-00002.parquet": gsm8k(1002, "old"),
        "main/test-00001-of-00002.parquet": gsm8k(2, "second part"),
    },
    ("tau/commonsense_qa", NEW): {
        "data/validation-00000-of-00001.parquet": [
            {
                "id": f"q{i}",
                "question": "Where?",
                "choices": {"label": list("ABCDE"), "text": ["a", "b", "c", "d", "e"]},
                "answerKey": "D",
            }
            for i in range(1001)
        ]
    },
    ("cais/mmlu", NEW): {"all/test-00000-of-00001.parquet": mmlu()},
    ("openai/openai_humaneval", NEW): {
        "openai_humaneval/test-00000-of-00001.parquet": [
            {
                "task_id": "HumanEval/0",
                "prompt": "def two():\n",
                "canonical_solution": "    return 2\n",
                "test": "def check(f):\n    assert f() == 2\n",
                "entry_point": "two",
            }
        ]
    },
    ("abisee/cnn_dailymail", NEW): {
        "3.0.0/test-00000-of-00001.parquet": [
            {"id": "f00", "article": "A long story.", "highlights": "A story."}
        ]
    },
}


def packed(rows: list[dict[str, Any]]) -> bytes:
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's HTTP interface that fetching a data set needs."""

    files: dict[tuple[str, str], dict[str, bytes]]
    asked: list[str]

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(path)
        match path.strip("/").split("/"):
            case ["api", "datasets", owner, name, "revision", revision]:
                self.info(f"{owner}/{name}", revision)
            case ["api", "datasets", owner, name, "tree", revision, *_]:
                self.tree(f"{owner}/{name}", revision)
            case ["datasets", owner, name, "resolve", revision, *file]:
                self.file(f"{owner}/{name}", revision, "/".join(file))
            case _:
                self.answer(404, b"", {})

    def found(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = NEW if revision == "main" else revision
        if (held := self.files.get((repository, commit))) is not None:
            return commit, held
        known = any(name == repository for name, _ in self.files)
        self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"})
        return None

    def info(self, repository: str, revision: str) -> None:
        if found := self.found(repository, revision):
            siblings = [{"rfilename": name} for name in ("README.md", *found[1])]
            self.json({"id": repository, "sha": found[0], "siblings": siblings, "tags": []})

    def tree(self, repository: str, revision: str) -> None:
        if found := self.found(repository, revision):
            names = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in found[1].items()
            ]
            self.json([{"type": "file", "path": "README.md", "size": 1, "oid": "1" * 40}, *names])

    def file(self, repository: str, revision: str, name: str) -> None:
        if found := self.found(repository, revision):
            data = found[1][name]
            mark = hashlib.sha256(data).hexdigest()
            self.answer(200, data, {"ETag": f'"{mark}"', "X-Repo-Commit": found[0]})

    def json(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def files() -> dict[tuple[str, str], dict[str, bytes]]:
    return {
        where: {name: packed(rows) for name, rows in held.items()}
        for where, held in PUBLISHED.items()
    }


@pytest.fixture
def asked(
    files: dict[tuple[str, str], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[str]]:
    """The hub's address and an empty cache in force, as HF_ENDPOINT and HF_HOME would have it; the
    paths that were asked for."""
    from huggingface_hub import constants

    requests: list[str] = []
    handler = type("Handler", (Hub,), {"files": dict(files), "asked": requests})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.delenv("OUTRIDER_DATA", raising=False)
        yield requests
        server.shutdown()


def test_rows_and_prompts_are_those_of_the_folder(asked: list[str]):
    first = load("gsm8k", 2)[0]
    assert first.name == "gsm8k/test/1000", "those before were trained on"
    assert first.prompt.startswith("new 1000?\nThink step by step")
    assert score(first, "#### 1000") == 1.0
    (choice,) = load("commonsense_qa", 5)
    assert choice.name == "commonsense_qa/q1000"
    assert choice.prompt.startswith("Where?\nA. a\nB. b\nC. c\nD. d\nE. e\nAnswer:\nReply")
    assert score(choice, "D. d") == 1.0
    (code,) = load("humaneval", 1)
    assert (code.raw, code.prompt) == (True, "def two():\n")
    (article,) = load("cnn_dailymail", 1)
    assert article.prompt == "Summarize: A long story."
    assert score(article, "A story.") == 1.0
    assert [path for path in asked if path.endswith("README.md")] == [], "only what is needed"


def test_nine_rows_of_each_subject_of_mmlu(asked: list[str]):
    rows = hub.fetch("mmlu").rows
    assert [r["id"] for r in rows[:3]] == [f"mmlu/test/astronomy/{n}" for n in (0, 11, 22)]
    assert len(rows) == 27
    assert rows[1]["answer"] == "D"
    assert rows[1]["prompt"] == "astronomy 11?\nA. w\nB. x\nC. y\nD. z\nAnswer:"


def test_a_revision_is_kept(asked: list[str]):
    """What is pinned when a run begins is what is asked when it goes on, whatever main is then."""
    assert pinned(["gsm8k", "gsm8k@" + OLD, "built-in"]) == {"gsm8k": NEW, "gsm8k@" + OLD: OLD}
    old = load("gsm8k@" + OLD, 10)
    assert [q.prompt.split("?")[0] for q in old] == [
        "old 1000",
        "old 1001",
        "second part 0",
        "second part 1",
    ], "files in order"
    assert old[0].data == "gsm8k"
    again = load("gsm8k", 10, {"gsm8k": OLD})
    assert [q.prompt for q in again] == [q.prompt for q in old]


def test_what_was_fetched_is_there_without_the_hub(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    online = load("gsm8k", 2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(asked)
    assert load("gsm8k", 2) == online
    assert len(asked) == before
    with pytest.raises(QuestionError, match=r"cannot be reached.*not in its cache.*OUTRIDER_DATA"):
        load("mmlu", 2)


def test_a_folder_wins_unless_a_revision_is_named(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OUTRIDER_DATA", str(tmp_path))
    with pytest.raises(QuestionError, match=r"gsm8k is not here.*\(from the hub\) gsm8k@main"):
        load("gsm8k", 1)
    assert load("gsm8k@main", 1)[0].name == "gsm8k/test/1000"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("gsm8k@nowhere", "openai/gsm8k has no revision 'nowhere': write gsm8k@REVISION"),
        ("gsm8k@" + "c" * 40, "has no revision"),
        ("gsm8k@", "write NAME@REVISION"),
        ("spec_bench@main", "there are gsm8k, commonsense_qa"),
        ("spec_bench", "set OUTRIDER_DATA to the folder that holds spec_bench/spec_bench.jsonl"),
    ],
)
def test_what_the_hub_has_not(asked: list[str], data: str, says: str):
    with pytest.raises(QuestionError) as caught:
        pinned([data])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "the hub has no data set openai/gsm8k, or it is private"),
        ({"main/train.parquet": b""}, "holds no main/test-*.parquet at main"),
        ({"main/test-0.parquet": b"<html>"}, "is no Parquet file"),
        (
            {"main/test-0.parquet": [{"frage": "x", "antwort": "y"}]},
            "has other columns than gsm8k is known by ('answer')",
        ),
    ],
)
def test_what_the_hub_has_in_another_form(
    asked: list[str],
    files: dict[tuple[str, str], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    content: dict[str, Any] | None,
    says: str,
):
    held = {k: v for k, v in files.items() if k[0] != "openai/gsm8k"}
    if content is not None:
        held["openai/gsm8k", NEW] = {
            name: data if isinstance(data, bytes) else packed(data)
            for name, data in content.items()
        }
    monkeypatch.setattr(Hub, "found", lambda s, *a: found(s, held, *a))
    with pytest.raises(QuestionError) as caught:
        load("gsm8k", 1)
    assert says in str(caught.value)


def found(self: Hub, held: Any, *words: str) -> Any:
    return REAL_FOUND(type("Other", (), {"files": held, "answer": self.answer}), *words)


REAL_FOUND = Hub.found


@pytest.mark.slow
def test_a_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    with pytest.raises(QuestionError, match=r"the data set gsm8k: .*hub.*; or set OUTRIDER_DATA"):
        load("gsm8k", 1)


def test_without_the_extra(asked: list[str], monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(QuestionError, match=r'pip install "outrider\[data\]"'):
        load("gsm8k", 1)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(QuestionError, match="client is not installed"):
        load("gsm8k", 1)
