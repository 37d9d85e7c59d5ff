"""The command line: what goes to stdout and stderr, exit codes, and one line for bad input.

Most tests run in this process on a toy pair; `model` marks those on the built-in pair.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from outrider.cli import app, run
from outrider.commands import models
from outrider.engines.base import ModelNotFoundError
from outrider.engines.drafters import ModelDrafter
from outrider.engines.tokenizer import ByteTokenizer
from outrider.engines.toy import Law, ToyModel, blend_law, random_law
from outrider.runtime.local import LocalGenerator

KEYS = {
    "text",
    "token_ids",
    "prompt_tokens",
    "completion_tokens",
    "finish_reason",
    "seed",
    "target_forwards",
    "drafted",
    "accepted",
    "accepted_per_position",
    "timing",
    "target",
    "draft",
    "verify",
}
CONTEXT = 128


def words(seed: int) -> Law:
    """A law that writes lower-case letters and blanks only, and ends now and then."""
    inner = random_law(seed, 257)
    mask = np.full(257, -np.inf, dtype=np.float32)
    mask[[*range(ord("a"), ord("z") + 1), ord(" "), ByteTokenizer.END]] = 0.0
    mask[ByteTokenizer.END] = -4.0
    return lambda context: (inner(context) + mask).astype(np.float32)


def toy_pair(*, draft: bool = True, law: Law | None = None) -> models.Pair:
    tokenizer = ByteTokenizer()
    common = {"vocab_size": 257, "context_length": CONTEXT, "eos_token_ids": frozenset({256})}
    target = ToyModel(law or words(1), name="toy", **common)
    guess = ToyModel(blend_law(words(1), words(2), 0.4, seed=3), name="toy-draft", **common)
    drafter = ModelDrafter("toy-draft", model=guess) if draft else None
    return models.Pair(tokenizer=tokenizer, generator=LocalGenerator(target, tokenizer, drafter))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """`models.load` gives a toy pair; everything else is the real command."""

    def load(*, draft: str | None, draft_length: int, **_options: object) -> models.Pair:
        return toy_pair(draft=draft != "none" and draft_length > 0)

    monkeypatch.setattr(models, "load", load)


Out = Callable[..., tuple[int, str, str]]


@pytest.fixture
def outrider(capsys: pytest.CaptureFixture[str]) -> Out:
    """Run one command line; exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


# -- answers ----------------------------------------------------------------------------------


def test_json_is_exactly_one_object(toy: None, outrider: Out):
    code, out, err = outrider("generate", "hi", "--json", "--seed", "7", "--max-tokens", "40")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    facts = json.loads(out)
    assert set(facts) >= KEYS
    assert facts["seed"] == 7
    assert facts["completion_tokens"] == len(facts["token_ids"]) <= 40
    assert facts["text"] == bytes(t for t in facts["token_ids"] if t < 256).decode()
    assert 0 < facts["accepted"] < facts["drafted"]
    assert sum(facts["accepted_per_position"]) == facts["accepted"]
    assert set(facts["timing"]) >= {"ttft_s", "tpot_s", "total_s"}
    assert (facts["target"], facts["draft"], facts["verify"]) == ("toy", "toy-draft", "coupled")


def test_the_draft_never_changes_the_text(toy: None, outrider: Out):
    """I1, through the whole command."""
    texts = set()
    for options in (
        ["--draft", "none"],
        ["--draft-length", "0"],
        ["--draft-length", "1"],
        ["--draft-length", "12"],
    ):
        code, out, _ = outrider("generate", "hi", "--json", "--seed", "11", *options)
        assert code == 0
        texts.add(tuple(json.loads(out)["token_ids"]))
    assert len(texts) == 1


def test_streamed_text_equals_the_json_text(toy: None, outrider: Out):
    arguments = ("generate", "hi", "--seed", "3", "--max-tokens", "50")
    _, out, err = outrider(*arguments)
    _, as_json, _ = outrider(*arguments, "--json")
    assert out == json.loads(as_json)["text"] + "\n"
    assert re.fullmatch(
        r"\d+ tokens · draft toy-draft: \d+% of guesses accepted · 0\.\d\d target calls per token "
        r"· \d+ ms per token · seed 3\n",
        err,
    )
    assert "\x1b" not in out + err  # no colour where there is no terminal


def test_without_a_seed_one_is_drawn_and_shown(toy: None, outrider: Out):
    seeds = set()
    for _ in range(4):
        _, out, _ = outrider("generate", "hi", "--json", "--max-tokens", "2")
        seeds.add(json.loads(out)["seed"])
    assert len(seeds) == 4  # 32 bits: four equal ones happen once in 700 million runs
    seed = seeds.pop()
    _, first, _ = outrider("generate", "hi", "--json", "--seed", str(seed))
    _, again, _ = outrider("generate", "hi", "--json", "--seed", str(seed))
    assert json.loads(first)["token_ids"] == json.loads(again)["token_ids"]


def test_prompt_from_stdin(toy: None, outrider: Out, monkeypatch: pytest.MonkeyPatch):
    _, direct, _ = outrider("generate", "from a pipe", "--seed", "1", "--json")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    _, piped, _ = outrider("generate", "-", "--seed", "1", "--json")
    assert json.loads(piped)["token_ids"] == json.loads(direct)["token_ids"]


def test_raw_and_system_shape_the_prompt(toy: None, outrider: Out):
    def length(*options: str) -> int:
        _, out, _ = outrider("generate", "hi", "--json", "--max-tokens", "1", *options)
        count: int = json.loads(out)["prompt_tokens"]
        return count

    assert length("--raw") == len("hi")
    assert length() == len("user: hi\nassistant: ")
    assert length("--system", "be kind") == len("system: be kind\nuser: hi\nassistant: ")


def test_sampling_options_reach_the_model(toy: None, outrider: Out):
    ban = [f"--logit-bias={token}=-100" for token in range(ord("a"), ord("z"))]
    _, out, _ = outrider("generate", "hi", "--json", "--min-tokens", "9", "--seed", "5", *ban)
    facts = json.loads(out)
    assert set(facts["text"]) <= {"z", " "}
    assert facts["completion_tokens"] >= 9


def test_stop_and_ignore_eos(toy: None, outrider: Out):
    base = ["generate", "hi", "--json", "--seed", "2", "--max-tokens", "60", "--ignore-eos"]
    _, out, _ = outrider(*base)
    free = json.loads(out)
    assert free["finish_reason"] == "length"
    assert free["completion_tokens"] == 60
    mark = free["text"][10:13]
    _, out, _ = outrider(*base, "--stop", mark)
    cut = json.loads(out)
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == free["text"][: free["text"].index(mark)]


def test_logprobs(toy: None, outrider: Out):
    _, out, _ = outrider("generate", "hi", "--json", "--logprobs", "2", "--seed", "1")
    facts = json.loads(out)
    assert len(facts["logprobs"]) == facts["completion_tokens"]
    assert all(entry["logprob"] <= 0 and len(entry["top"]) == 2 for entry in facts["logprobs"])


def test_the_ratio_rule(toy: None, outrider: Out):
    code, out, _ = outrider("generate", "hi", "--json", "--verify", "ratio", "--seed", "1")
    assert code == 0
    assert json.loads(out)["verify"] == "ratio"


def test_ctrl_c_keeps_what_was_printed(outrider: Out, monkeypatch: pytest.MonkeyPatch):
    plain = words(1)

    def interrupted(context: tuple[int, ...]) -> np.ndarray:
        if len(context) > 40:
            raise KeyboardInterrupt
        return plain(context)

    monkeypatch.setattr(models, "load", lambda **_: toy_pair(draft=False, law=interrupted))
    code, out, err = outrider("generate", "hi", "--ignore-eos", "--seed", "1")
    assert code == 130
    assert len(out) == 41 - len("user: hi\nassistant: ") + 1  # the tokens before, a line break
    assert err == ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "> /dev/null 2>&- <&-"])
def test_closed_streams_lead_nowhere(closed: str):
    words = f"{sys.executable} -m outrider generate hi --target toy --draft none --max-tokens 3"
    process = subprocess.run(
        ["sh", "-c", f"exec {words} --seed 1 {closed}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0
    assert "Traceback" not in process.stdout + process.stderr


def test_a_closed_stdin_is_an_empty_prompt():
    words = f"{sys.executable} -m outrider generate - --target toy --draft none"
    process = subprocess.run(
        ["sh", "-c", f"exec {words} <&-"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert re.fullmatch(r"error: the prompt is empty.*\n", process.stderr)


def test_a_closed_pipe_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "outrider", "version"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (1, "")


# -- bad input --------------------------------------------------------------------------------

NOBODY = ("--cloud", "ws://127.0.0.1:1")
BAD = {
    "empty prompt": ([""], "prompt is empty"),
    "long prompt": (["x" * CONTEXT], f"error: prompt: has 146 tokens; the context of {CONTEXT}"),
    "temperature": (["hi", "--temperature", "-1"], "--temperature: must be in [0, 100]"),
    "temperature nan": (["hi", "--temperature", "nan"], "--temperature: must be"),
    "temperature word": (["hi", "--temperature", "hot"], "--temperature"),
    "top-p": (["hi", "--top-p", "1.5"], "--top-p: must be in (0, 1]"),
    "top-k": (["hi", "--top-k", "-1"], "--top-k: must be in [0,"),
    "min-p": (["hi", "--min-p", "2"], "--min-p: must be in [0, 1]"),
    "repetition": (["hi", "--repetition-penalty", "0"], "--repetition-penalty: must be in"),
    "presence": (["hi", "--presence-penalty", "3"], "--presence-penalty: must be in [-2, 2]"),
    "frequency": (["hi", "--frequency-penalty", "-3"], "--frequency-penalty: must be in [-2, 2]"),
    "seed": (["hi", "--seed", "-1"], "--seed: must be in [0, 9223372036854775807]"),
    "huge seed": (["hi", "--seed", str(2**63)], "--seed: must be in"),
    "max-tokens": (["hi", "--max-tokens", "0"], "--max-tokens: must be in [1,"),
    "min-tokens": (["hi", "--min-tokens", "500"], "--min-tokens: must be in [0, 256]"),
    "negative K": (["hi", "--draft-length", "-1"], "--draft-length: must be in [0, 64]"),
    "huge K": (["hi", "--draft-length", "65"], "--draft-length: must be in [0, 64]"),
    "stop": (["hi", "--stop", ""], "--stop: each must have 1 to"),
    "bias": (["hi", "--logit-bias", "abc"], "--logit-bias takes ID=BIAS"),
    "big bias": (["hi", "--logit-bias", "5=101"], "--logit-bias: must be in [-100, 100]"),
    "bias id": (["hi", "--logit-bias", "-1=1"], "--logit-bias: must be in [0,"),
    "logprobs": (["hi", "--json", "--logprobs", "21"], "--logprobs: must be in [0, 20]"),
    "logprobs alone": (["hi", "--logprobs", "1"], "add --json"),
    "raw system": (["hi", "--raw", "--system", "x"], "--raw or --system"),
    "dtype": (["hi", "--dtype", "int3"], "'auto', 'bfloat16', 'float16', 'float32'"),
    "verify": (["hi", "--verify", "luck"], "'coupled', 'ratio'"),
    "threads": (["hi", "--threads", "0"], "--threads"),
    "schedule without a cloud": (["hi", "--schedule", "sync"], "give --cloud"),
    "link without a cloud": (["hi", "--link", "rtt=1ms"], "--link needs a network"),
    "login without a cloud": (["hi", "--token-file", __file__], "--token-file needs a network"),
    "login that is not there": (["hi", "--token-file", "/no/file"], "--token-file"),
    "link at the edge alone": (
        ["hi", "--schedule", "edge-only", "--cloud", "ws://x", "--link", "rtt=1ms"],
        "--link needs a network",
    ),
    "window without a cloud": (["hi", "--window", "9999"], "--window needs a network"),
    "growth without a cloud": (["hi", "--growth", "0.5"], "--growth needs a network"),
    "insecure without a cloud": (["hi", "--insecure"], "--insecure needs a network"),
    "a cloud at the edge alone": (
        ["hi", "--schedule", "edge-only", "--cloud", "ws://127.0.0.1:1"],
        "leave --cloud out",
    ),
    "empty link": (["hi", *NOBODY, "--link", ""], "--link: '' is not name=value"),
    "slow link": (["hi", *NOBODY, "--link", "rtt=12s"], "no connection can live"),
    "thin link": (["hi", *NOBODY, "--link", "up=1bit"], "no connection can live"),
    "authority without TLS": (["hi", *NOBODY, "--ca-file", __file__], "--ca-file: is for wss://"),
    "no window": (["hi", *NOBODY, "--window", "0"], "--window: must be in [1,"),
    "bare target": (["hi", *NOBODY, "--target", "nonsense"], "owner/name"),
    "bare draft": (["hi", *NOBODY, "--draft", "nonsense"], "--draft: no model 'nonsense'"),
    "port 0": (["hi", "--cloud", "ws://127.0.0.1:0"], "--cloud: must be ws://HOST:PORT"),
    "a host with no name": (["hi", "--cloud", "ws://a..b:1"], "--cloud: must be ws://HOST:PORT"),
    "dtype, cloud": (["hi", "--dtype", "float32", "--cloud", "ws://x"], "outrider cloud"),
    "no bits, cloud": (["hi", "--no-deterministic", "--cloud", "ws://x"], "outrider cloud"),
    "negative K, cloud": (
        ["hi", "--draft-length", "-1", "--target", "toy", "--draft", "toy", "--cloud", "ws://x"],
        "--draft-length: must be in",
    ),
    "relaxing nothing": (["hi", "--relax-rule", "fsd"], "--relax-rule: only with --verify relaxed"),
    "relaxing nothing, nan": (
        ["hi", "--budget", "nan", "--sketch", "999"],
        "--budget, --sketch: only with --verify relaxed",
    ),
    "top-k reply, coupled": (
        ["hi", *NOBODY, "--top-k-reply", "16", "--tv-budget", "0"],
        "--top-k-reply, --tv-budget: only with --verify ratio",
    ),
    "top-k reply, one process": (
        ["hi", "--verify", "ratio", "--tv-budget", "0.1"],
        "--tv-budget: only with --cloud",
    ),
    "top-k reply, no guesses": (
        ["hi", *NOBODY, "--verify", "ratio", "--top-k-reply", "4", "--schedule", "cloud-only"],
        "--top-k-reply: only where the edge sends guesses",
    ),
    "top-k reply, K 0": (
        ["hi", *NOBODY, "--verify", "ratio", "--top-k-reply", "4", "--draft-length", "0"],
        "--top-k-reply: only where the edge sends guesses",
    ),
    "top-k reply too long": (
        ["hi", *NOBODY, "--verify", "ratio", "--top-k-reply", "1025"],
        "--top-k-reply: must be in [0, 1024]",
    ),
    "TV budget nan": (
        ["hi", *NOBODY, "--verify", "ratio", "--tv-budget", "nan"],
        "--tv-budget: must be a number in [0, inf]",
    ),
    "TV budget and no list": (
        ["hi", *NOBODY, "--verify", "ratio", "--tv-budget", "0.1", "--top-k-reply", "0"],
        "--tv-budget: is spent on lists",
    ),
    "budget nan": (["hi", "--verify", "relaxed", "--budget", "nan"], "budget"),
    "threshold": (["hi", "--verify", "relaxed", "--threshold", "0.7"], "threshold"),
    "relaxed at the edge alone": (
        ["hi", "--schedule", "edge-only", "--verify", "relaxed"],
        "edge-only judges nothing",
    ),
    "controller of no drafts": (
        ["hi", *NOBODY, "--schedule", "cloud-only", "--controller", "auto"],
        "there are none here",
    ),
    "controller without a draft": (
        ["hi", *NOBODY, "--draft", "none", "--controller", "specstop"],
        "there are none here",
    ),
    "another controller of T": (
        ["hi", *NOBODY, *("--verify", "relaxed", "--relax-rule", "e2sci"), "--controller", "auto"],
        "adapts T by --controller credit",
    ),
    "unknown controller": (
        ["hi", *NOBODY, "--controller", "magic"],
        "--controller: must be one of",
    ),
    "options of fixed": (["hi", *NOBODY, "--controller", "fixed:k=3"], "fixed has no options"),
    "colocated without drafts": (
        ["hi", *NOBODY, "--schedule", "colocated", "--draft-length", "0"],
        "nothing to draft",
    ),
    "no prompt": ([], "PROMPT"),
    "unknown option": (["hi", "--creativity", "9"], "--creativity"),
    "broken text": (["\udcff"], "not valid UTF-8"),
}


@pytest.mark.parametrize("json_wanted", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(toy: None, outrider: Out, case: str, json_wanted: bool):
    arguments, message = BAD[case]
    if json_wanted and case == "logprobs alone":
        pytest.skip("not an error with --json")
    code, out, err = outrider("generate", *arguments, *(["--json"] if json_wanted else []))
    assert code == 2
    assert out == ""
    assert re.fullmatch(r"error: .+\n", err), err
    assert message.lower() in err.lower()


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["--frobnicate"], ["demo", "--prompts", "9"]]
)
def test_unknown_words_are_one_line(outrider: Out, arguments: list[str]):
    code, out, err = outrider(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: .+\n", err), err


def test_a_bug_keeps_its_traceback(outrider: Out, monkeypatch: pytest.MonkeyPatch):
    def bug(**_: object) -> models.Pair:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(models, "load", bug)
    with pytest.raises(ZeroDivisionError, match="ours"):
        outrider("generate", "hi")


# -- the other commands -----------------------------------------------------------------------


def test_bare_outrider_teaches(outrider: Out):
    code, out, _ = outrider()
    assert code == 0
    assert "generate" in out
    assert 'outrider generate "Why is the sky blue?"' in out


def test_demo_json(toy: None, outrider: Out):
    code, out, err = outrider("demo", "--local", "--json", "--prompts", "2", "--max-tokens", "20")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["identical_answers"] == facts["prompts"] == 2
    plain, speculative, free = facts["rows"]
    assert plain["forwards_per_token"] == free["forwards_per_token"] == 1.0
    assert plain["acceptance"] is None
    assert speculative["forwards_per_token"] < 1.0
    assert 0.0 < speculative["acceptance"] <= 1.0
    assert speculative["identical_to_cloud_only"] == 2


def test_demo_shows_an_answer_and_a_table(toy: None, outrider: Out):
    code, out, err = outrider("demo", "--local", "--prompts", "1", "--max-tokens", "20")
    assert code == 0
    assert out.startswith("> Write a Python function")
    assert "Same ids as the target alone: 1 of 1 answers." in out
    assert re.search(r"target alone +│ +1\.00 │ +- │ +\d+\.\d", out)
    assert re.search(r"with toy-draft, K=4 +│ +0\.\d\d │ +\d+% │ +\d+\.\d", out)
    assert "seed 0" in err


def test_demo_needs_a_draft(toy: None, outrider: Out):
    code, out, err = outrider("demo", "--draft-length", "0")
    assert (code, out) == (2, "")
    assert "--draft-length 1 to 64" in err


def test_doctor_without_torch_names_the_command(outrider: Out, monkeypatch: pytest.MonkeyPatch):
    from outrider import diagnose

    versions = diagnose._version

    def version(name: str) -> str | None:
        absent = {*diagnose.PACKAGES["torch"], *diagnose.PACKAGES["llamacpp"]}
        return None if name in absent else versions(name)

    monkeypatch.setattr(diagnose, "_version", version)
    code, out, _ = outrider("doctor")
    assert code == 1
    assert "not installed: torch, transformers" in out
    assert 'pip install "outrider[torch]"' in out
    code, out, err = outrider("doctor", "--json")
    facts = json.loads(out)
    assert (code, err, facts["ok"]) == (1, "", False)
    assert facts["problems"][0]["fix"] == 'pip install "outrider[torch]"'


def test_doctor_is_content_with_one_engine(outrider: Out, monkeypatch: pytest.MonkeyPatch):
    from outrider import diagnose

    here = {*diagnose.PACKAGES["base"], *diagnose.PACKAGES["llamacpp"]}
    monkeypatch.setattr(diagnose, "_version", lambda name: "1" if name in here else None)
    monkeypatch.setattr("outrider.engines.builtin.find_gguf", lambda: Path("there.gguf"))
    code, out, _ = outrider("doctor")
    assert code == 0
    assert "llama-cpp-python 1" in out
    assert "torch (missing)" in out


def test_doctor_without_weights_names_the_command(outrider: Out, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outrider.engines.builtin.find_gguf", lambda: None)
    code, out, _ = outrider("doctor")
    assert code == 1
    assert "outrider pull" in out


def test_pull_reports_where_the_weights_are(outrider: Out, monkeypatch: pytest.MonkeyPatch):
    def pull(*, progress: Callable[[str, int, int], None]) -> str:
        for done in range(3):
            progress("fetching", done, 2)
        return "somewhere.gguf"

    monkeypatch.setattr("outrider.engines.builtin.pull", pull)
    code, out, err = outrider("pull")
    assert (code, out, err) == (0, "builtin:smollm2 is ready: somewhere.gguf\n", "")


@pytest.mark.parametrize(
    ("error", "code"), [(ModelNotFoundError("no\nindex"), 2), (OSError("disk is full"), 1)]
)
def test_pull_that_fails_is_one_line(
    outrider: Out, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
):
    def pull(**_: object) -> str:
        raise error

    monkeypatch.setattr("outrider.engines.builtin.pull", pull)
    assert outrider("pull") == (code, "", f"error: {' '.join(str(error).split())}\n")


@pytest.mark.parametrize(
    "words",
    [
        ("report", "FILE"),
        ("bench", "--resume", "FILE"),
        ("bench", "FILE"),
        ("simulate", "FILE"),
        ("simulate", "SCENARIO", "--set", "link.up-trace=trace"),
        ("generate", "hi", "--json-schema", "FILE"),
        ("load", "--draft", "replay:FILE"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_file_that_is_not_there_is_said_in_words(
    toy: None, outrider: Out, tmp_path: Path, words: tuple[str, ...]
):
    missing = str(tmp_path / "missing")
    (tmp_path / "scenario").write_text("")
    given = [w.replace("FILE", missing).replace("SCENARIO", f"{tmp_path}/scenario") for w in words]
    code, out, err = outrider(*given)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "no such file" in err.lower() or "does not exist" in err
    assert "Errno" not in err


def test_a_folder_that_is_not_there_is_said_in_words(outrider: Out, tmp_path: Path):
    where = tmp_path / "no" / "run.jsonl"
    (tmp_path / "scenario").write_text("")
    code, out, err = outrider("bench", str(tmp_path / "scenario"), "-o", str(where))
    assert (code, out, err) == (2, "", f"error: {where}: no such file or directory\n")


def test_distill_shows_the_defaults_it_uses():
    made = pytest.importorskip("outrider.distill.run")
    options = {p.name: p.default for p in get_command(app).commands["distill"].params}
    config = made.DistillConfig(work=Path("work"))
    assert options["tokens"] == config.corpus_tokens
    for name in ("layers", "support", "steps", "seed"):
        assert options[name] == getattr(config, name)


# -- the real loader ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "no-such-org/no-such-model"], "no-such-model"),
        (["--target", "builtin:nothing"], "builtin:smollm2"),
        (["--target", "/no/such/folder"], "/no/such/folder"),
        (["--target", "toy:x"], "toy:x"),
        (["--target", "toy", "--draft", "no such draft"], "no such draft"),
        (["--target", "toy", "--device", "abacus"], "abacus"),
    ],
)
def test_models_that_cannot_be_loaded(
    outrider: Out, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
):
    pytest.importorskip("torch")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, err = outrider("generate", "hi", "--json", *options)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: .+\n", err), err
    assert message in err


def test_the_toy_target_by_name(outrider: Out):
    """The real loader, no torch: a random law over bytes, and a draft that often agrees."""
    base = ("generate", "hi", "--json", "--target", "toy:5", "--seed", "1", "--max-tokens", "30")
    _, plain, _ = outrider(*base, "--draft", "none")
    code, out, err = outrider(*base, "--draft", "toy:5:0.5")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["token_ids"] == json.loads(plain)["token_ids"]
    assert 0 < facts["accepted"] < facts["drafted"]


def test_edge_only_is_the_drafts_own_text(outrider: Out):
    """The label must be true: the target has no part in it."""
    base = ("generate", "hi", "--json", "--seed", "1", "--max-tokens", "30")
    _, target, _ = outrider(*base, "--target", "toy:1", "--draft", "none")
    _, own, _ = outrider(*base, "--target", "toy:2", "--draft", "none")
    code, out, err = outrider(
        *base, "--target", "toy:1", "--draft", "toy:2", "--schedule", "edge-only"
    )
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["token_ids"] == json.loads(own)["token_ids"]
    assert facts["token_ids"] != json.loads(target)["token_ids"]
    assert (facts["schedule"], facts["target"]) == ("edge-only", "toy:2")
    code, out, err = outrider(
        *base, "--target", "toy:1", "--draft", "lookup", "--schedule", "edge-only"
    )
    assert (code, out) == (2, "")
    assert "needs a draft model" in err


@pytest.mark.parametrize("module", ["typer", "numpy", "msgspec"])
@pytest.mark.parametrize("command", ["generate", "cloud", "demo"])
def test_ctrl_c_while_python_imports(module: str, command: str, tmp_path: Path):
    """As if it came in the middle of that module."""
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt\n")
    process = subprocess.run(
        [sys.executable, "-m", "outrider", command, "hi"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (process.returncode, process.stdout, process.stderr) == (130, b"", b"")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "a..b:9100", "--insecure"], "'a..b' is no host name"),
        (["--listen", "127.0.0.1:²"], "--listen takes HOST:PORT"),
        (["--listen", f"{'a' * 70}:1", "--insecure"], "is no host name"),
        (["--tls-cert", __file__, "--tls-key", __file__], f"--tls-cert: {__file__} holds no PEM"),
        (["--model", "nonsense"], "--model: no model 'nonsense'; use builtin:smollm2, toy:N"),
        (["--draft", "nonsense"], "owner/name"),
        (["--drain", "nan"], "--drain"),
    ],
)
def test_a_verifier_that_cannot_be_is_refused_before_its_model_is_loaded(
    outrider: Out, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
):
    def load(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("outrider.engines.load.load_target", load)
    code, out, err = outrider("cloud", *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: .+\n", err), err
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "0"], "--window: must be in"),
        (["--draft-length", "65"], "--draft-length: must be in"),
        (["--temperature", "-1"], "--temperature: must be in"),
        (["--link", "rtt=12s"], "--link: "),
        (["--target", "nonsense"], "--target: no model"),
    ],
)
def test_a_demo_that_cannot_be_starts_no_verifier(
    outrider: Out, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
):
    async def start(_: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr("outrider.runtime.process.CloudProcess.start", start)
    code, out, err = outrider("demo", *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: .+\n", err), err
    assert message in err


def test_a_real_ctrl_c():
    words = ["generate", "hi", "--target", "toy", "--draft", "none", "--max-tokens", "4000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", *words, "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    assert first
    assert (first + out).endswith(b"\n")


@pytest.mark.model
def test_generate_on_the_built_in_pair(outrider: Out):
    pytest.importorskip("torch")
    from outrider.engines import builtin

    if builtin.find_gguf() is None:
        pytest.skip("the built-in weights are not here: outrider pull")
    code, out, err = outrider(
        *("generate", "What is 2 + 2?", "--json", "--temperature", "0", "--max-tokens", "12"),
        *("--draft", "lookup", "--threads", "1"),
    )
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert set(facts) >= KEYS
    assert facts["target"] == "builtin:smollm2"
    assert "4" in facts["text"]
