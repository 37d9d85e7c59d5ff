"""Data sets from the hub: the published files as the rows that a folder would hold.

A set's files are fetched once into the hub's own cache (HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE
mean what they always mean) at one commit, which the run keeps: what goes on later asks the same
rows. The rows, their ids and their prompts are those of the folder (bench.questions): a question is
the same wherever it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

Row = Mapping[str, Any]
LATEST: Final = "main"
EXTRA: Final = 'pip install "outrider[data]"'
LETTERS: Final = "ABCDEFGHIJ"
EACH_SUBJECT: Final = 9
"""Rows of a subject of MMLU, so that each weighs the same; there are 14,042 questions in all."""


class HubError(ValueError):
    """A set that the hub does not give; the message names the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Where a set is, and what its rows are called there."""

    repository: str
    files: str
    """Pattern of the Parquet files of the split that is asked."""
    rows: Callable[[Sequence[Row]], Iterator[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A set as it was fetched."""

    rows: list[dict[str, Any]]
    source: str
    """REPOSITORY@COMMIT."""
    commit: str


def _gsm8k(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows):
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        yield {
            "id": f"gsm8k/test/{number}",
            "prompt": row["question"],
            "reference": row["answer"],
            "answer": answer,
        }


def _choice(question: str, choices: Sequence[str]) -> str:
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False)]
    return "\n".join([question.strip(), *lines, "Answer:"])


def _commonsense_qa(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield {
            "id": f"commonsense_qa/{row['id']}",
            "prompt": _choice(row["question"], row["choices"]["text"]),
            "answer": row["answerKey"],
        }


def _mmlu(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Row floor(k n / 9), k = 0..8, of each subject's n."""
    for subject, group in groupby(
        sorted(rows, key=lambda r: str(r["subject"])), lambda r: r["subject"]
    ):
        found = list(group)
        places = dict.fromkeys(k * len(found) // EACH_SUBJECT for k in range(EACH_SUBJECT))
        for place in places:
            row = found[place]
            yield {
                "id": f"mmlu/test/{subject}/{place}",
                "subject": subject,
                "prompt": _choice(row["question"], row["choices"]),
                "answer": LETTERS[row["answer"]],
            }


def _humaneval(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield {
            "id": row["task_id"],
            "prompt": row["prompt"],
            "reference": row["canonical_solution"],
            "test": row["test"],
            "entry_point": row["entry_point"],
        }


def _cnn_dailymail(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield {
            "id": f"cnn_dailymail/{row['id']}",
            "prompt": f"Summarize: {row['article']}",
            "reference": row["highlights"],
        }


PUBLISHED: Final[Mapping[str, Published]] = {
    "gsm8k": Published(repository="openai/gsm8k", files="main/test-*.parquet", rows=_gsm8k),
    "commonsense_qa": Published(
        repository="tau/commonsense_qa", files="data/validation-*.parquet", rows=_commonsense_qa
    ),  # the test split has no answers
    "mmlu": Published(repository="cais/mmlu", files="all/test-*.parquet", rows=_mmlu),
    "humaneval": Published(
        repository="openai/openai_humaneval",
        files="openai_humaneval/test-*.parquet",
        rows=_humaneval,
    ),
    "cnn_dailymail": Published(
        repository="abisee/cnn_dailymail", files="3.0.0/test-*.parquet", rows=_cnn_dailymail
    ),
}


def fetch(data: str, revision: str = LATEST) -> Fetched:
    """The rows of a set at a revision (a branch, a tag, a commit). Raises HubError."""
    published = PUBLISHED[data]
    folder = _download(data, published, revision)
    files = sorted(folder.glob(published.files))
    if not files:
        raise HubError(
            f"{published.repository} holds no {published.files} at {revision}: "
            f"name a revision that does, {data}@REVISION"
        )
    try:
        rows = [row for file in files for row in _read(file)]
        made = list(published.rows(rows))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise HubError(
            f"{published.repository} at {revision} has other columns than {data} is known by "
            f"({error}): name a revision that has them, {data}@REVISION"
        ) from None
    commit = folder.name  # the cache's layout: snapshots/COMMIT
    return Fetched(rows=made, source=f"{published.repository}@{commit}", commit=commit)


def _download(data: str, published: Published, revision: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ModuleNotFoundError:
        raise HubError(f"the hub's client is not installed: {EXTRA}") from None
    where = published.repository
    try:
        return Path(
            snapshot_download(
                where, repo_type="dataset", revision=revision, allow_patterns=[published.files]
            )
        )
    except LocalEntryNotFoundError:  # a kind of EntryNotFoundError: first
        raise HubError(
            f"the hub cannot be reached, and {where} at {revision} is not in its cache"
        ) from None
    except RevisionNotFoundError:
        raise HubError(
            f"{where} has no revision {revision!r}: write {data}@REVISION with a branch, a tag or "
            "a commit of it"
        ) from None
    except (RepositoryNotFoundError, EntryNotFoundError):
        raise HubError(f"the hub has no data set {where}, or it is private") from None
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HubError(f"{where} could not be fetched from the hub: {reason}") from None


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise HubError(f"pyarrow, which reads the hub's files, is not installed: {EXTRA}") from None
    try:
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise HubError(
            f"{file} is no Parquet file ({reason}): delete it to fetch it anew"
        ) from None
    return rows
