"""A server of a toy target in the shapes of real ones, on a real socket, with faults to switch on.

The shapes of `vllm` and `llama` were recorded from vLLM 0.32 and llama-server; that of `sglang` is
the documented one and was never compared with a live server.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import numpy as np

from live import TARGET, TOKENIZER
from outrider.core.sampling import likeliest
from outrider.engines.toy import Law

MOST: Final = 20
"""Likeliest ids that the server tells, as vLLM does unless told otherwise."""
CONTEXT: Final = 512


@dataclass
class Server:
    """What a test may change while it runs."""

    shape: str = "vllm"
    """'vllm', 'llama', or 'text': as `vllm`, with texts for ids."""
    law: Law = TARGET
    model: str = "toy-model"
    root: str = "weights-1"
    key: str = ""
    most: int = MOST
    cached: bool = True
    """SGLang: tells that it had the context before."""
    tokenizes: bool = True
    other_tokenizer: bool = False
    one_answer: bool = False
    """Answers the first prompt of a list and no other."""
    error: tuple[int, str] | None = None
    """Status and message of every answer to come."""
    garbage: bool = False
    gone: bool = False
    """Hangs up on everybody, in the middle of a stream as well."""
    weights: str = "default"
    """SGLang: which it runs, where /model_info or its older name tells."""
    model_info: str = "/model_info"
    scores: bool = True
    """Has /generate."""
    ignores_start: bool = False
    """SGLang: scores the whole input whatever logprob_start_len says."""
    dropped: str = ""
    """A field that is missing in every choice, or in SGLang's meta_info."""
    break_after: int | None = None
    """Events of a stream before the connection drops."""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    url: str = ""

    def top(self, ids: tuple[int, ...], count: int) -> list[tuple[int, float]]:
        row = self.law(ids).astype(np.float64)
        log = row - row.max() - np.log(np.exp(row - row.max()).sum())
        best = likeliest(log.astype(np.float32), count)
        return sorted(((int(i), float(log[i])) for i in best), key=lambda e: (-e[1], e[0]))

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def entry(self, ids: tuple[int, ...], count: int) -> tuple[int, dict[str, Any]]:
        """Likeliest token and `logprobs` of one generated position."""
        told = self.top(ids, min(max(count, 1), self.most))
        token = told[0][0]
        if self.shape == "llama":
            items = [{"id": i, "token": "", "bytes": [], "logprob": p} for i, p in told]
            return token, {"content": [items[0] | {"top_logprobs": items}]}
        name = "token_id:{}" if self.shape == "vllm" else "text {}"
        return token, {
            "tokens": [name.format(token)],
            "token_logprobs": [told[0][1]],
            "top_logprobs": [{name.format(i): p for i, p in told}],
        }

    def choice(self, index: int, ids: tuple[int, ...], count: int) -> dict[str, Any]:
        token, told = self.entry(ids, count)
        more = {"token_ids": [token]} if self.shape == "vllm" else {}
        whole = {"index": index, "text": "x", "logprobs": told, "finish_reason": None} | more
        return {name: value for name, value in whole.items() if name != self.dropped}


@contextlib.contextmanager
def serving(**facts: Any) -> Iterator[Server]:
    """A server that answers until the block ends."""
    server = Server(**facts)
    http = _Http(("127.0.0.1", 0), _handler(server))
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        yield server
    finally:
        server.gone = True  # whoever kept a connection
        http.shutdown()
        http.server_close()
        thread.join()


class _Http(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that closed a stream early is what some tests are about."""


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            """Nothing: a test's output is its own."""

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            server.asked.append((self.path, body))
            if server.gone:
                self.close_connection = True
                return
            if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
                self._json(401, {"error": {"message": "no"}})
            elif server.error is not None:
                self._json(server.error[0], {"error": {"message": server.error[1]}})
            elif server.garbage:
                self._send(200, b"<html>", "text/html")
            elif self.path == "/v1/models":
                self._json(200, {"data": [_card(server)]})
            elif self.path == "/tokenize" and server.tokenizes:
                self._json(200, {"tokens": _tokenize(server, body["prompt"])})
            elif self.path == "/v1/completions":
                self._complete(body)
            elif self.path == server.model_info:
                weights = {"model_path": server.root, "weight_version": server.weights}
                self._json(200, {"tokenizer_path": "words", **weights})
            elif self.path == "/generate" and server.scores:
                inputs = zip(body["input_ids"], body["logprob_start_len"], strict=True)
                self._json(200, [_scored(server, i, s, body) for i, s in inputs])
            else:
                self._json(404, {"error": {"message": "not found"}})

        def _complete(self, body: Any) -> None:
            if body["stream"]:
                self._stream(tuple(body["prompt"]), body)
                return
            if isinstance(body["prompt"][0], int):
                self._json(200, {"model": server.model, "choices": [_answer(server, body)]})
                return
            prompts = [tuple(p) for p in body["prompt"]]
            prompts = prompts[:1] if server.one_answer else prompts
            choices = [server.choice(i, p, body["logprobs"]) for i, p in enumerate(prompts)]
            self._json(200, {"model": server.model, "choices": choices[::-1]})

        def _stream(self, ids: tuple[int, ...], body: Any) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.close_connection = True
            for sent in range(body["max_tokens"]):
                if sent == server.break_after or server.gone:
                    self.connection.close()
                    return
                choice = server.choice(0, ids, 1)
                token, _ = server.entry(ids, 1)
                self._event({"model": server.model, "choices": [choice]})
                ids = (*ids, token)
                if token == TOKENIZER.END:
                    break
            self._event({"model": server.model, "choices": []})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, value: Any) -> None:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

        def _json(self, status: int, value: Any) -> None:
            self._send(status, json.dumps(value).encode(), "application/json")

        def _send(self, status: int, data: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def _answer(server: Server, body: Any) -> dict[str, Any]:
    """One prompt's greedy answer, whatever else was asked for: every field is dropped."""
    ids, parts = tuple(body["prompt"]), []
    for _ in range(body["max_tokens"]):
        parts.append(server.choice(0, ids, body["logprobs"]))
        ids = (*ids, server.entry(ids, 1)[0])
    told = [part["logprobs"] for part in parts]
    joined = {name: [item for t in told for item in t[name]] for name in told[0]}
    more = {"token_ids": list(ids[len(body["prompt"]) :])} if server.shape == "vllm" else {}
    return parts[0] | {"logprobs": joined} | more


def _card(server: Server) -> dict[str, Any]:
    return {"id": server.model, "root": server.root, "max_model_len": CONTEXT, "created": 1}


def _tokenize(server: Server, text: str) -> list[int]:
    ids = TOKENIZER.encode(text)
    return [i + 1 for i in ids] if server.other_tokenizer else ids


def _scored(server: Server, ids: list[int], start: int, body: Any) -> dict[str, Any]:
    """SGLang: null at `start`, then a row for each further input id, then the generated one."""
    count = min(body["top_logprobs_num"], server.most)

    def row(end: int) -> list[list[Any]]:
        return [[p, i, None] for i, p in server.top(tuple(ids[:end]), count)]

    start = 0 if server.ignores_start else start
    inputs = [None, *(row(end) for end in range(start + 1, len(ids)))]
    meta = {
        "input_top_logprobs": inputs,
        "output_top_logprobs": [row(len(ids))],
        "cached_tokens": start if server.cached else 0,
        "prompt_tokens": len(ids),
    }
    meta = {name: value for name, value in meta.items() if name != server.dropped}
    whole = {"text": "", "meta_info": meta}
    return {name: value for name, value in whole.items() if name != server.dropped}
