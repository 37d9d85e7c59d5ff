"""Clients of other people, unchanged, against a gateway on a real socket. Each in an environment of
its own (`outside`); skipped where it is not installed."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import outside
import pytest

from live import TARGET, TOKENIZER, alone
from live import run as run_within
from outrider.core.tokens import SamplingParams
from served import HELLO, MODEL, Served, served

pytestmark = [pytest.mark.clients, pytest.mark.timeout(2 * outside.START_S)]


def run(work: Any) -> None:
    run_within(work, patience=outside.PATIENCE_WITH_CLIENTS)


def expected(prompt: str | None = None) -> str:
    """What the target says: to the chat, or behind a text."""
    ids = TOKENIZER.chat(HELLO) if prompt is None else TOKENIZER.encode(prompt)
    return alone(SamplingParams(seed=7, max_tokens=24), tuple(ids)).text


def heard(client: Callable[[Served], Awaitable[Any]]) -> Any:
    """What a client made of a gateway, which is left as it was."""
    found: list[Any] = []

    async def work() -> None:
        async with served() as gateway:
            found.append(await client(gateway))
            await gateway.pair.idle()

    run(work())
    return found[0]


def test_litellm():
    told = heard(lambda g: outside.python("litellm_completion", "litellm", g.url))
    assert told == {
        "whole": expected(),
        "finish": "length",
        "tokens": 24,
        "streamed": expected(),
        "text": expected("hi"),
    }


def test_langchain():
    told = heard(lambda g: outside.python("langchain_chat", "langchain_openai", g.url))
    assert told == {
        "whole": expected(), "finish": "length", "tokens": 24, "streamed": expected()
    }  # fmt: skip


def test_openai_for_node(tmp_path: Path):
    told = heard(lambda g: outside.node("openai_node", "openai", g.url, tmp_path))
    assert told == {
        "whole": expected(),
        "finish": "length",
        "tokens": 24,
        "streamed": expected(),
        "helper": expected(),
        "text": expected("hi"),
        "refused": ["BadRequestError", "temperature"],
    }


def test_the_ai_sdk(tmp_path: Path):
    told = heard(lambda g: outside.node("ai_sdk", "ai", g.url, tmp_path))
    assert told == {
        "whole": expected(),
        "finish": "length",
        "tokens": 24,
        "streamed": expected(),
        "streamedTokens": 24,
    }


@pytest.mark.parametrize("how", [(), ("--no-stream",)])
def test_llm(how: tuple[str, ...], tmp_path: Path):
    llm = outside.command("llm")

    async def ask(gateway: Served) -> str:
        facts = {"model_id": "here", "model_name": MODEL, "api_base": f"{gateway.url}/v1"}
        (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([facts]))
        options = ("-o", "seed", "7", "-o", "max_tokens", "24", "--key", "none")
        env = {"LLM_USER_PATH": str(tmp_path)}
        return await outside.ran(llm, "-m", "here", *options, *how, "hi", env=env)

    assert heard(ask) == expected() + "\n"


# What a model of text cannot do, and what takes a model that ends a string some time.
BEYOND = {"chat-image-input", "chat-tool-calling"}


def test_llm_comply():
    """Every check that a text model can pass, none with a warning."""
    comply = outside.command("llm-comply")

    async def ask(gateway: Served) -> Any:
        words = ("--format", "openai-chat", "-u", f"{gateway.url}/v1", "-k", "none", "-m", MODEL)
        names = [case for case in CHECKS if case not in BEYOND]
        return json.loads(await outside.ran(comply, *words, "--json", "-f", ",".join(names)))

    told = heard(ask)
    results = {result["id"]: result for result in told["results"]}
    assert set(results) == set(CHECKS) - BEYOND
    for name, result in results.items():
        assert result["status"] == "passed", (name, result)
        assert not result.get("warnings"), (name, result)


def test_llm_comply_is_told_that_pictures_are_not_read():
    """The proper error (test_gateway_errors has its words) instead of an answer that never saw the
    picture. The ninth check is skipped by llm-comply itself, for the model's name."""
    comply = outside.command("llm-comply")

    async def ask(gateway: Served) -> Any:
        words = ("--format", "openai-chat", "-u", f"{gateway.url}/v1", "-k", "none", "-m", MODEL)
        names = "chat-image-input,chat-reasoning-summary"
        return json.loads(await outside.ran(comply, *words, "--json", "-f", names, status=1))

    picture, reasoning = heard(ask)["results"]
    assert picture["id"] == "chat-image-input"
    assert picture["errors"][0].startswith("HTTP 400 ")
    assert (reasoning["id"], reasoning["status"]) == ("chat-reasoning-summary", "skipped")


CHECKS = (
    "chat-basic-response",
    "chat-system-prompt",
    "chat-multi-turn",
    "chat-tool-calling",
    "chat-streaming-response",
    "chat-streaming-usage",
    "chat-image-input",
    "chat-error-handling",
)


# -- those that measure -----------------------------------------------------------------------


def byte_tokenizer(into: Path) -> Path:
    """The toy's tokenizer as a folder that transformers reads: id = byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    vocab = {letters[byte]: byte for byte in range(256)} | {"<end>": TOKENIZER.END}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    byte_level["trim_offsets"] = True
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    whole = {
        "version": "1.0",
        "added_tokens": [
            {"id": TOKENIZER.END, "content": "<end>", "special": True, **special},
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    into.mkdir()
    (into / "tokenizer.json").write_text(json.dumps(whole))
    (into / "tokenizer_config.json").write_text(json.dumps(facts))
    return into


TASK = {
    "task": "ends",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
ITEMS = [
    {"question": "sun and m", "choices": ["oon", "an", "ice are very small"], "answer": 0},
    {"question": "black and wh", "choices": ["ite", "y"], "answer": 1},
]


def logprob(context: str, text: str) -> float:
    """Of a text behind another one, by the toy itself."""
    ids, total = list(context.encode()), 0.0
    for byte in text.encode():
        row = TARGET(tuple(ids)).astype(np.float64)
        total += row[byte] - np.logaddexp.reduce(row)
        ids.append(byte)
    return total


def test_lm_eval_scores_as_the_target_itself(tmp_path: Path):
    lm_eval = outside.command("lm_eval")
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")
    data = tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "ends.yaml").write_text(json.dumps(task))

    async def ask(gateway: Served) -> None:
        facts = f"model={MODEL},base_url={gateway.url}/v1/completions,tokenizer={tokenizer}"
        await outside.ran(
            lm_eval, "run", "--model", "local-completions", "--model_args",
            f"{facts},num_concurrent=4", "--tasks", "ends",
            "--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out"),
            "--log_samples", env={"HF_HOME": str(tmp_path / "hf")}, cwd=tmp_path,
        )  # fmt: skip

    heard(ask)
    [samples] = (tmp_path / "out").rglob("samples_ends*.jsonl")
    lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda x: x["doc_id"])
    assert len(lines) == len(ITEMS)
    for item, line in zip(ITEMS, lines, strict=True):
        found = [float(response[0][0]) for response in line["resps"]]
        own = [logprob(item["question"], choice) for choice in item["choices"]]
        assert found == pytest.approx(own, abs=1e-3)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(route: str, tmp_path: Path):
    guidellm = outside.command("guidellm")
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("why is it so\nwhat is it\nhi\n")
    report = tmp_path / "report.json"

    async def ask(gateway: Served) -> None:
        await outside.ran(
            guidellm, "run", "--disable-console-interactive",
            "--backend", f"kind=openai_http,target={gateway.url},model={MODEL},"
            f"request_format={route},max_tokens=16",
            "--profile", "kind=concurrent,streams=2",
            "--constraint", "kind=max_requests,count=3",
            "--data", f"kind=text_file,path={prompts}",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
            "--output", f"kind=json,path={report}",
            env={"HF_HOME": str(tmp_path / "hf")}, cwd=tmp_path,
        )  # fmt: skip

    heard(ask)
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 3  # each prompt once
    assert totals["errored"] == 0
