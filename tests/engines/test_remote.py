"""A server's model as a target: the ids of the model in this process, and every fault named."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from live import PROMPT, TARGET, TOKENIZER, alone, drafter
from outrider.core.tokens import ParameterError, Rule, SamplingParams
from outrider.engines import remote
from outrider.engines.base import Block, EngineError, ServerError
from outrider.engines.load import Loaded, load_target, load_vocabulary
from outrider.engines.remote_http import Endpoint
from outrider.engines.remote_ways import AHEAD
from outrider.runtime.local import GenerationRequest, GenerationResult, LocalGenerator
from servers import CONTEXT, MOST, Server, serving
from toys import remember

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SHAPES = [("openai", "vllm"), ("openai", "llama"), ("vllm", "vllm"), ("vllm", "llama")]
SHAPES += [("sglang", "vllm")]


def load(server: Server, way: str, **options: Any) -> Loaded:
    return load_target(f"{way}:{server.url}#toy:1", **options)


def answer(
    loaded: Loaded, params: SamplingParams, *, rule: Rule = Rule.COUPLED, drafts: int = 4
) -> GenerationResult:
    generator = LocalGenerator(loaded.model, loaded.tokenizer, drafter() if drafts else None)
    return generator.generate(
        GenerationRequest(prompt_ids=PROMPT, params=params, draft_length=drafts, rule=rule)
    )


@pytest.mark.parametrize(("way", "shape"), SHAPES)
@pytest.mark.parametrize("drafts", [0, 4])
def test_greedy_ids_are_the_models_own(way: str, shape: str, drafts: int):
    with serving(shape=shape) as server:
        got = answer(load(server, way), GREEDY, drafts=drafts)
    assert got.token_ids == alone(GREEDY).token_ids
    assert (got.counters.accepted > 0) == (drafts > 0)


@pytest.mark.parametrize("way", ["vllm", "sglang"])
@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.RATIO])
@pytest.mark.parametrize("facts", [{"top_k": MOST}, {"top_k": 7, "top_p": 0.9, "min_p": 0.01}])
def test_likeliest_ids_are_enough_for_sampling_with_top_k(
    way: str, rule: Rule, facts: dict[str, Any]
):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, **facts)
    with serving() as server:
        got = answer(load(server, way), params, rule=rule)
    if rule is Rule.COUPLED:
        assert got.token_ids == alone(params).token_ids
    assert got.counters.accepted > 0


def test_greedy_ratio_over_a_stream():
    with serving() as server:
        got = answer(load(server, "openai"), GREEDY, rule=Rule.RATIO)
    assert got.token_ids == alone(GREEDY).token_ids


@pytest.mark.parametrize(
    ("way", "params", "rule", "field"),
    [
        ("openai", SamplingParams(temperature=1.0), Rule.COUPLED, "temperature"),
        ("vllm", SamplingParams(temperature=1.0), Rule.COUPLED, "temperature"),
        ("vllm", SamplingParams(temperature=0.0, logprobs=2), Rule.COUPLED, "logprobs"),
    ],
)
def test_what_a_server_cannot_do_exactly_is_refused_before_it_is_asked(
    way: str, params: SamplingParams, rule: Rule, field: str
):
    with serving() as server:
        loaded = load(server, way)
        before = len(server.asked)
        with pytest.raises(ParameterError) as refused:
            answer(loaded, params, rule=rule)
        assert len(server.asked) == before
    assert refused.value.field == field


# -- what is asked of a server ------------------------------------------------------------------


def test_a_stream_serves_its_whole_answer_with_one_request():
    with serving() as server:
        answer(load(server, "openai"), GREEDY)
        assert server.paths().count("/v1/completions") == 1


def test_a_stream_is_opened_again_behind_what_is_committed():
    params = SamplingParams(temperature=0.0, max_tokens=AHEAD + 10, ignore_eos=True)
    with serving(law=WITHOUT_END) as server:
        got = answer(load(server, "openai"), params)
        asked = [body["prompt"] for path, body in server.asked if path == "/v1/completions"]
    assert len(got.token_ids) == AHEAD + 10
    assert asked == [list(PROMPT), [*PROMPT, *got.token_ids[:AHEAD]]]


def no_end(context: tuple[int, ...]) -> Any:
    row = TARGET(context).copy()
    row[TOKENIZER.END] = -50.0
    return row


WITHOUT_END = remember(no_end, 2)


@pytest.mark.parametrize("way", ["vllm", "sglang"])
def test_every_forward_is_one_request_with_neutral_parameters(way: str):
    with serving() as server:
        model = load(server, way).model
        slots = [model.open(), model.open()]
        model.forward([Block(slot=slots[0], start=0, tokens=PROMPT, rows=0)])
        before = len(server.asked)
        rows = model.forward(
            [
                Block(slot=slots[0], start=3, tokens=(97, 98, 99), rows=3),
                Block(slot=slots[1], start=0, tokens=PROMPT, rows=1),
            ]
        )
        (_, body), *further = server.asked[before:]
    assert not further
    assert [len(r) for r in rows] == [3, 1]
    assert (np.argmax(rows[0][2]), np.argmax(rows[1][0])) == (
        np.argmax(TARGET((*PROMPT, 97, 98, 99))),
        np.argmax(TARGET(PROMPT)),
    )
    asked = body["sampling_params"] if way == "sglang" else body
    assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (1.0, 1.0, -1)


def test_rows_behind_a_wrong_guess_that_a_stream_does_not_know_cannot_be_used():
    with serving() as server:
        model = load(server, "openai").model
        slot = model.open()
        right = int(np.argmax(TARGET(PROMPT)))
        rows = model.forward([Block(slot=slot, start=0, tokens=(*PROMPT, right, 0, 0), rows=4)])[0]
    assert int(rows[0].argmax()) == right
    assert int(rows[1].argmax()) == int(np.argmax(TARGET((*PROMPT, right))))
    assert np.isnan(rows[2:]).all()


@pytest.mark.parametrize("other", [(100, 101, 102), (*PROMPT, 97, 97)])
def test_a_stream_of_other_ids_is_not_gone_on_with(other: tuple[int, ...]):
    with serving() as server:
        model = load(server, "openai").model
        slot = model.open()
        model.forward([Block(slot=slot, start=0, tokens=PROMPT, rows=1)])
        model.truncate(slot, 0)
        rows = model.forward([Block(slot=slot, start=0, tokens=other, rows=1)])[0]
    right, stale = (int(np.argmax(TARGET(ids))) for ids in (other, PROMPT))
    assert right != stale
    assert int(rows[0].argmax()) == right


def test_a_cache_that_is_lost_is_said_once(caplog: pytest.LogCaptureFixture):
    long = PROMPT * 100
    with serving() as server, caplog.at_level(logging.WARNING, "outrider.remote"):
        model = load(server, "sglang").model
        slot = model.open()
        model.forward([Block(slot=slot, start=0, tokens=long, rows=1)])
        model.forward([Block(slot=slot, start=len(long), tokens=(97,), rows=1)])
        assert not caplog.records
        server.cached = False
        for i in range(3):
            model.forward([Block(slot=slot, start=len(long) + 1 + i, tokens=(97,), rows=1)])
    assert len(caplog.records) == 1
    assert "computes whole contexts anew" in caplog.text


def test_facts_of_the_model_come_from_both_sides():
    with serving() as server:
        info = load(server, "vllm").model.info
    assert (info.context_length, info.known_ids, info.deterministic) == (CONTEXT, MOST, False)
    assert info.fingerprint == TOKENIZER.fingerprint
    assert info.name == "vllm#toy:1"  # an edge learns no address


def test_a_key_goes_with_every_request_and_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
):
    with serving(key="secret") as server:
        with pytest.raises(ServerError, match="401"):
            load(server, "vllm")
        monkeypatch.setenv(remote.KEY_VARIABLE, "secret")
        assert answer(load(server, "vllm"), GREEDY).token_ids == alone(GREEDY).token_ids


# -- servers that are not what they should be ---------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "way", "words"),
    [
        ({"shape": "text"}, "openai", "by text and not by id"),
        ({"shape": "text"}, "vllm", "by text and not by id"),
        ({"most": 5}, "vllm", "20 likeliest ids were asked for and 5 were told"),
        ({"most": 5}, "sglang", "20 likeliest ids were asked for and 5 were told"),
        ({"one_answer": True}, "vllm", "does not take a list of prompts"),
        ({"break_after": 3}, "openai", "broke off in the middle of an answer"),
        ({"dropped": "logprobs", "shape": "llama"}, "openai", "texts and no token ids"),
        ({"dropped": "logprobs", "shape": "llama"}, "vllm", "texts and no token ids"),
        ({"dropped": "logprobs"}, "vllm", "20 likeliest ids were asked for and 0 were told"),
        ({"scores": False}, "sglang", "/generate answered 404: not found"),
        ({"ignores_start": True}, "sglang", "it ignores logprob_start_len"),
        ({"dropped": "meta_info"}, "sglang", "not understood .KeyError"),
        ({"dropped": "input_top_logprobs"}, "sglang", "not understood .KeyError"),
        ({"dropped": "output_top_logprobs"}, "sglang", "not understood .KeyError"),
        ({"dropped": "cached_tokens"}, "sglang", "not understood .KeyError"),
    ],
)
def test_a_server_that_says_too_little_is_refused_with_the_reason(
    facts: dict[str, Any], way: str, words: str
):
    with serving(**facts) as server:
        loaded = load(server, way)
        with pytest.raises(ServerError, match=words):
            answer(loaded, GREEDY)


def test_garbage_is_an_error_of_ours():
    with serving() as server:
        loaded = load(server, "vllm")
        server.garbage = True
        with pytest.raises(ServerError, match="not JSON"):
            answer(loaded, GREEDY)


def test_an_error_of_the_server_is_shown_without_what_it_quotes():
    with serving() as server:
        loaded = load(server, "vllm")
        server.error = (400, "too long: ['my secret prompt']")
        with pytest.raises(ServerError, match=r"/v1/completions answered 400: too long:$"):
            answer(loaded, GREEDY)


def test_another_tokenizer_is_refused_when_it_is_loaded():
    with serving(other_tokenizer=True) as server, pytest.raises(ServerError, match="tokenizer"):
        load(server, "vllm")


def test_a_tokenizer_that_cannot_be_asked_is_said(caplog: pytest.LogCaptureFixture):
    with serving(tokenizes=False) as server:
        load(server, "vllm")
    assert "nobody has checked" in caplog.text


WAYS = ("openai", "vllm", "sglang")


def test_ids_without_likeliest_ones_are_enough_for_the_greedy_answer():
    with serving(dropped="logprobs") as server:
        assert answer(load(server, "openai"), GREEDY).token_ids == alone(GREEDY).token_ids


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_weights_that_sglang_loads_in_place_are_another_model(
    path: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote, "IDENTITY_S", -1.0)
    with serving(model_info=path) as server:
        loaded = load(server, "sglang")
        assert answer(loaded, GREEDY).token_ids == alone(GREEDY).token_ids
        server.weights = "step-2"
        with pytest.raises(ServerError, match="no longer serves"):
            answer(loaded, GREEDY)


def test_an_sglang_that_does_not_tell_its_weights_is_known_by_its_card(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(remote, "IDENTITY_S", -1.0)
    with serving(model_info="/nowhere") as server:
        loaded = load(server, "sglang")
        assert answer(loaded, GREEDY).token_ids == alone(GREEDY).token_ids
        server.root = "weights-2"
        with pytest.raises(ServerError, match="no longer serves"):
            answer(loaded, GREEDY)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [{"root": "weights-2"}, {"model": "another"}])
def test_a_model_that_is_swapped_under_a_session_ends_it(
    way: str, change: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote, "IDENTITY_S", -1.0)  # look every time
    with serving() as server:
        loaded = load(server, way)
        model, slot = loaded.model, loaded.model.open()
        model.forward([Block(slot=slot, start=0, tokens=PROMPT, rows=1)])
        for name, value in change.items():
            setattr(server, name, value)
        with pytest.raises(ServerError, match="no longer serves the toy-model it began with"):
            model.forward([Block(slot=slot, start=3, tokens=(97,), rows=1)])
        assert model.length(slot) == 3  # the failed forward counts for nothing


@pytest.mark.parametrize("way", ["openai", "vllm"])  # SGLang's /generate names none
def test_an_answer_in_another_models_name_is_not_taken(way: str):
    with serving() as server:
        loaded = load(server, way)
        server.model = "another"
        with pytest.raises(ServerError, match="swapped"):
            answer(loaded, GREEDY)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("fault", "words"),
    [({"error": (503, "loading")}, "503: loading"), ({"gone": True}, "is the server running")],
)
def test_a_server_that_comes_back_is_asked_again(way: str, fault: dict[str, Any], words: str):
    with serving() as server:
        loaded = load(server, way)
        before = {name: getattr(server, name) for name in fault}
        for name, value in fault.items():
            setattr(server, name, value)
        with pytest.raises(ServerError, match=words):
            answer(loaded, GREEDY)
        for name, value in before.items():
            setattr(server, name, value)
        assert answer(loaded, GREEDY).token_ids == alone(GREEDY).token_ids


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_is_shut_down_is_said(way: str):
    with serving() as server:
        loaded = load(server, way)
    with pytest.raises(ServerError, match=r"no answer from http.*; is the server running"):
        answer(loaded, GREEDY)


def test_nobody_at_the_address():
    with serving() as server:
        url = server.url
    with pytest.raises(ServerError, match=r"no answer from http.*refused; is the server running"):
        load_target(f"openai:{url}#toy:1")


def test_one_of_several_models_must_be_named():
    with serving() as server:
        with pytest.raises(ServerError, match="serves: toy-model; name one as"):
            load_target(f"openai:{server.url}?model=other#toy:1")
        named = load_target(f"openai:{server.url}?model=toy-model#toy:1")
        assert answer(named, GREEDY).token_ids == alone(GREEDY).token_ids


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("openai:http://127.0.0.1:1", "openai:URL#MODEL"),
        ("openai:http://127.0.0.1:1#", "openai:URL#MODEL"),
        ("vllm:http://127.0.0.1:1?key=x#toy:1", "only .model=ID"),
        ("vllm:ftp://127.0.0.1:1#toy:1", "http://HOST:PORT"),
        ("vllm:http://me:secret@127.0.0.1:1#toy:1", "holds no login"),
        ("vllm:http://127.0.0.1:99999#toy:1", "no usable port"),
    ],
)
def test_specs_that_are_half_right(spec: str, words: str):
    with pytest.raises(ServerError, match=words):
        load_target(spec)


def test_how_a_server_computes_is_not_ours_to_say():
    with pytest.raises(EngineError, match="leave out --dtype"):
        load_target("vllm:http://127.0.0.1:1#toy:1", dtype="bfloat16")


def test_an_edge_takes_the_vocabulary_and_asks_no_server():
    assert load_vocabulary("vllm:http://127.0.0.1:1#toy:1").tokenizer.vocab_size == 257


def test_a_kept_connection_that_was_closed_is_opened_again():
    with serving() as server:
        endpoint = Endpoint(server.url)
        first = endpoint.get("/v1/models")
        kept = endpoint._kept
        assert kept is not None
        assert kept.sock is not None
        kept.sock.shutdown(2)
        assert endpoint.get("/v1/models") == first
        assert endpoint.connects == 2
        endpoint.close()
