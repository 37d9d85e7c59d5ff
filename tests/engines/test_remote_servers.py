"""The remote engines against a real server that is named from outside; none is started here.

    OUTRIDER_TEST_SERVER="vllm:http://127.0.0.1:8000#builtin:smollm2" \\
        pytest -m slow tests/engines/test_remote_servers.py

The server has to run the built-in model. Tried with vLLM 0.32 on a CPU (bfloat16) and llama-server.
"""

from __future__ import annotations

import os

import pytest

from outrider.core.tokens import SamplingParams
from outrider.engines import remote
from outrider.engines.drafters import ModelDrafter
from outrider.engines.load import load_target
from outrider.engines.remote_http import Endpoint
from outrider.engines.remote_probe import probe
from outrider.runtime.local import GenerationRequest, GenerationResult, LocalGenerator

SPEC = os.environ.get("OUTRIDER_TEST_SERVER", "")
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SPEC, reason="OUTRIDER_TEST_SERVER names no server"),
]


def answer(params: SamplingParams, *, way: str, drafts: int) -> GenerationResult:
    loaded = load_target(f"{way}:{SPEC.partition(':')[2]}")
    ids = tuple(loaded.tokenizer.chat(QUESTION))
    generator = LocalGenerator(loaded.model, loaded.tokenizer, ModelDrafter("lookup", lookup=True))
    return generator.generate(GenerationRequest(prompt_ids=ids, params=params, draft_length=drafts))


@pytest.mark.parametrize("way", ["openai", "vllm"])
@pytest.mark.parametrize("drafts", [0, 4])
def test_greedy_ids_are_the_servers_own(way: str, drafts: int):
    params = SamplingParams(temperature=0.0, max_tokens=40)
    got = answer(params, way=way, drafts=drafts)
    wanted = remote.parse(SPEC)
    assert wanted is not None
    server = Endpoint(wanted.url)
    body = {
        "model": remote.chosen(server, wanted)["id"],
        "prompt": load_target(SPEC).tokenizer.chat(QUESTION),
        "max_tokens": 40,
        "temperature": 0.0,
    }
    # Not one word of ours in this request: the text alone is compared.
    assert got.text == server.post("/v1/completions", body)["choices"][0]["text"]


def test_guesses_do_not_change_a_sampled_text():
    params = SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=40)
    plain = answer(params, way="vllm", drafts=0)
    assert answer(params, way="vllm", drafts=4).token_ids == plain.token_ids


def test_the_probe_finds_it_usable():
    wanted = remote.parse(SPEC)
    assert wanted is not None
    report = probe(Endpoint(wanted.url), wanted.served)
    assert {w.way for w in report.ways if w.usable} >= {"openai", "vllm"}
