"""A replayed draft says what the draft said, takes its time, and makes nothing up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from live import PROMPT, TOKENIZER, drafter
from outrider.core.tokens import Rule, SamplingParams
from outrider.engines.base import EngineError, UnrecordedError
from outrider.engines.load import load_drafter, load_target
from outrider.engines.replay import RecordedAnswer, ReplayDrafter, load_replay, read
from recordings import LENGTH, SEEDS, params, recorded, written


def replay(token_seconds: float | None = 0.0, **how: object) -> ReplayDrafter:
    return ReplayDrafter(recorded(**how), token_seconds=token_seconds)  # type: ignore[arg-type]


def answer(**changes: object) -> RecordedAnswer:
    facts = {
        "task": "t",
        "seed": 1,
        "prompt": (9,),
        "output": (1, 2, 3, 4),
        "chains": {1: (7, 8, 6)},
        "prefill_seconds": 0.5,
    }
    return RecordedAnswer(**(facts | changes))  # type: ignore[arg-type]


# ---------------------------------------------------------------- the same guesses


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_every_block_is_the_drafts_own(ignore_eos: bool):
    """From every position of the text, of every length, and from every guess beside the text."""
    held = recorded(ignore_eos=ignore_eos)
    asked = 0
    for one in held.answers:
        sampling = held.header.sampling.params(one.seed)
        real = drafter().session(len(PROMPT), sampling, Rule.COUPLED)
        again = ReplayDrafter(held, token_seconds=0.0).session(len(PROMPT), sampling, Rule.COUPLED)
        for at in range(min(len(one.output), LENGTH - 1)):
            text = (*PROMPT, *one.output[:at])
            most = min(8, LENGTH - 1 - at)
            whole = real.propose(text, most).tokens
            for count in range(1, most + 1):
                assert again.propose(text, count).tokens == whole[:count]
            for ahead in range(1, len(whole)):
                context = (*text, *whole[:ahead])
                count = most - ahead
                assert again.propose(context, count).tokens == whole[ahead:]
                asked += 1
        real.close()
        again.close()
    assert asked > 100


def test_a_walk_in_literals():
    one = answer()
    assert one.guesses((), 1, 3) == (1,)
    assert one.guesses((), 4, 3) == (1, 7, 8, 6)
    assert one.guesses((1,), 2, 3) == (7, 8)
    assert one.guesses((1, 7), 2, 3) == (8, 6)
    assert one.guesses((1, 2), 2, 3) == (3, 4)
    assert one.guesses((1, 2), 5, 3) == (3, 4), "behind the end there is nothing to guess"
    assert one.guesses((1, 7, 8, 6), 0, 3) == ()


def test_a_chain_the_draft_ended_is_no_miss():
    one = answer(ended=(1,))
    assert one.guesses((1, 7, 8), 3, 3) == (6,)
    assert one.guesses((1, 7, 8, 6), 3, 3) == ()
    silent = answer(chains={1: ()}, ended=(1,))
    assert silent.guesses((), 3, 3) == (1,)
    assert silent.guesses((1,), 3, 3) == ()


# ---------------------------------------------------------------- nothing made up


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ((1, 5), "token 1: recorded with another target"),
        ((1, 7, 9), "token 1: recorded with another target"),
        ((1, 2, 9), "token 2: recorded with another target"),
        ((1, 2, 3, 4, 5), "token 4: recorded with another target"),
    ],
)
def test_another_text_is_refused(output: tuple[int, ...], why: str):
    with pytest.raises(UnrecordedError, match=why):
        answer().guesses(output, 1, 3)


def test_text_beyond_a_chain_the_draft_ended_is_refused():
    with pytest.raises(UnrecordedError, match="leaves the recorded one at its token 1"):
        answer(ended=(1,)).guesses((1, 7, 8, 6, 5), 1, 3)


@pytest.mark.parametrize(("output", "count"), [((), 5), ((1,), 4), ((1, 7, 8), 2)])
def test_beyond_the_window_is_refused(output: tuple[int, ...], count: int):
    with pytest.raises(UnrecordedError, match="--window 3: record with a larger one"):
        answer().guesses(output, count, 3)


def ask(sampling: SamplingParams, *, prompt: tuple[int, ...] = PROMPT, rule: Rule = Rule.COUPLED):
    session = replay().session(len(prompt), sampling, rule)
    return session.propose(prompt, 4)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seed": 99}, "recorded with seeds 5 to 10, not 99"),
        ({"temperature": 0.5}, "recorded with temperature 1.0, not 0.5"),
        ({"top_k": 3}, "recorded with top-k 0, not 3"),
        ({"ignore_eos": False}, "recorded with ignore-eos True, not False"),
        ({"presence_penalty": 0.5}, "recorded with presence-penalty 0.0, not 0.5"),
        ({"stop": ("x",)}, "recorded with stop"),
        ({"max_tokens": LENGTH + 1}, "recorded with --max-tokens 40, not 41"),
    ],
)
def test_another_request_is_refused(changes: dict[str, object], why: str):
    seed = changes.pop("seed", SEEDS[0])
    with pytest.raises(UnrecordedError, match=why):
        ask(params(seed, **changes))  # type: ignore[arg-type]


def test_fewer_tokens_are_the_beginning_of_the_same_text():
    assert ask(params(SEEDS[0], max_tokens=5)) == ask(params(SEEDS[0]))


def test_another_prompt_is_refused():
    with pytest.raises(UnrecordedError, match="another prompt for seed 5"):
        ask(params(SEEDS[0]), prompt=(72, 105, 34))


@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.RELAXED])
def test_rules_whose_text_hangs_on_the_draft_are_refused(rule: Rule):
    with pytest.raises(UnrecordedError, match=f"for the coupled rule: under {rule.value}"):
        ask(params(SEEDS[0]), rule=rule)


def test_a_controller_that_asks_the_draft_is_refused():
    class Stop:
        needs_hidden = False

        def start(self) -> None: ...

        def stop(self, signal: object) -> bool:
            return False

    session = replay().session(len(PROMPT), params(SEEDS[0]), Rule.COUPLED)
    with pytest.raises(UnrecordedError, match="how sure it was"):
        session.propose(PROMPT, 4, Stop())


# ---------------------------------------------------------------- time


def naps(token_seconds: float | None) -> list[float]:
    """Seconds slept by two blocks, of 3 and 2 guesses, behind a prompt that took 50 ms."""
    slept: list[float] = []
    first = structs.replace(recorded().answers[0], prefill_seconds=0.05)
    held = replace(recorded(), answers=(first,))
    drafter = ReplayDrafter(held, token_seconds=token_seconds, sleep=slept.append)
    session = drafter.session(len(PROMPT), params(SEEDS[0]), Rule.COUPLED)
    session.propose(PROMPT, 3)
    session.propose((*PROMPT, *first.output[:2]), 2)
    session.propose((*PROMPT, *first.output[:2]), 0)
    return slept


def test_it_sleeps_as_long_as_the_draft_took():
    """The recorded guess took 2 ms; the prompt's share goes with the pace."""
    assert naps(None) == pytest.approx([0.048 + 0.006, 0.004])
    assert naps(0.004) == pytest.approx([0.096 + 0.012, 0.008])
    assert naps(0.0) == []


# ---------------------------------------------------------------- files


def test_a_file_comes_back_as_it_was(tmp_path: Path):
    held = recorded()
    found = read(written(tmp_path / "toy.jsonl", held))
    assert found == held


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda text: b"", "is no recording of drafts"),
        (lambda text: b'{"format":"outrider-traces"}\n', "is no recording of drafts"),
        (lambda text: text.replace(b'"version":1', b'"version":7', 1), "version 7; this Outrider"),
        (lambda text: text[:-20], "line 7: cut short"),
        (lambda text: text.split(b"\n")[0] + b"\n", "holds no answer yet"),
        (lambda text: text.replace(b'"window":8', b'"window":0', 1), "line 1: .*window"),
        (lambda text: text.replace(b'"temperature":1.0', b'"temperature":-1'), "line 1: temp"),
        (lambda text: text.replace(b'"task"', b'"tusk"'), "line 2: .*record it anew"),
        (lambda text: text.replace(b'"chains":{', b'"chains":{"999":[1],'), "line 2: .*outside"),
        (lambda text: text.replace(b'"output":[', b'"output":[-5,'), "line 2: "),
        (lambda text: text.replace(b'"seed":5,"prompt"', b'"seed":5,\xff"prompt"'), "line 2: "),
    ],
)
def test_a_damaged_file_is_one_clear_line(spoil, why: str, tmp_path: Path):
    path = written(tmp_path / "toy.jsonl", recorded())
    text = spoil(path.read_bytes())
    assert text != path.read_bytes()
    path.write_bytes(text)
    with pytest.raises(EngineError, match=why) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert "toy.jsonl" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(EngineError, match=r"cannot read the recording .*No such file"):
        read(tmp_path / "none.jsonl")


def test_specs(tmp_path: Path):
    held = recorded()
    facts = held.header.target
    path = written(tmp_path / "toy.jsonl", held)

    def load(query: str = "", **changes: str) -> ReplayDrafter:
        wanted = {"target": facts.name, "fingerprint": facts.fingerprint} | changes
        return load_replay(f"replay:{path}{query}", **wanted)

    assert load().token_seconds == 0.002
    assert load("?pace=0").token_seconds == 0.0
    assert load("?pace=2.5").token_seconds == 0.0025
    assert load().name == "toy-draft (replayed)"
    for query in ("?", "?pace=", "?pace=x", "?pace=-1", "?pace=nan", "?speed=1"):
        with pytest.raises(EngineError, match=r"use \?pace=MS"):
            load(query) if query != "?" else load("?x")
    with pytest.raises(UnrecordedError, match="recorded with --target toy, not other"):
        load(target="other")
    with pytest.raises(UnrecordedError, match="another tokenizer"):
        load(fingerprint="00")
    with pytest.raises(EngineError, match="names no file"):
        load_replay("replay:", target="t", fingerprint="f")


def test_a_recording_stands_alone():
    target = load_target("toy:1")
    with pytest.raises(EngineError, match="stands alone; use --draft replay:x"):
        load_drafter("lookup+replay:x", target)
    assert TOKENIZER.fingerprint == target.tokenizer.fingerprint
