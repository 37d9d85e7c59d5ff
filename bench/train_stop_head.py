"""Trains the stop head of a draft (`specdecpp`) and says what it is worth.

    OUTRIDER_DATA=... python bench/train_stop_head.py --draft large --out FOLDER

Training text: the target's own answers in smollm2_corpus (temperatures .6 and .8), and answers it
makes here to cnn_dailymail articles, which no draft was trained on. Held out: its answers to the
rows that no draft was trained on (bench/prompts.py). Every guess and label is of temperature .7.

Figures, on the held-out answers:

* one guess at a time: AUC, Brier score, calibration; beside the head, one trained without the
  hidden state, and q(x) and AdaEDL's entropy bound as scores;
* rounds replayed: the coupled rule makes the answer of a seed known, so a block stands as far as
  it equals the answer, and no target is needed. Tokens and drafts are counted, seconds are
  modelled, N(k) = k t_d + R + t_v(k + 1), with the times given.

The result is FOLDER/<draft>.head.npz and FOLDER/<draft>.head.json. Examples are kept in --cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prompts import data_folder, mixed

from outrider.control.base import (
    Controller,
    ControllerFacts,
    Estimates,
    Observation,
    Outcome,
)
from outrider.control.costs import PrefixCurve, RowCosts
from outrider.control.registry import make
from outrider.core import rng
from outrider.core.draft import DraftSignal
from outrider.core.rng import Purpose
from outrider.core.sampling import History, SamplingPipeline
from outrider.core.tokens import Rule, SamplingParams
from outrider.distill.examples import Examples, Watching, collect, joined
from outrider.distill.head import HeadConfig, figures, predictions, train_head
from outrider.engines.base import Block
from outrider.engines.drafters import ModelDrafter
from outrider.engines.load import Loaded, load_drafter, load_target

LONGEST = 8
"""Longest block of the replay."""
ARTICLE_CHARACTERS = 1200
Text = tuple[list[int], int, SamplingParams]
"""Prompt and answer, length of the prompt, parameters with the answer's seed."""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------- texts


def corpus_texts(args: argparse.Namespace) -> Iterator[Text]:
    """Answers of the corpus at .6 and .8, spread over it, cut at `tokens`."""
    with gzip.open(data_folder() / "smollm2_corpus" / "corpus.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    rows = [r for r in rows if 0.55 < r["t"] < 0.85 and len(r["p"]) <= 300]
    source = np.random.default_rng(args.seed)
    for i in source.permutation(len(rows)):
        ids = [*rows[i]["p"], *rows[i]["y"][: args.tokens]]
        yield ids, len(rows[i]["p"]), parameters(args, int(source.integers(2**40)))


def article_prompts() -> list[str]:
    path = data_folder() / "cnn_dailymail" / "summeval_100.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [str(row.get("prompt") or row["turns"][0])[:ARTICLE_CHARACTERS] for row in rows]


def parameters(args: argparse.Namespace, seed: int) -> SamplingParams:
    return SamplingParams(temperature=args.temperature, seed=seed, max_tokens=args.tokens)


def answers(target: Loaded, prompts: Sequence[str], args: argparse.Namespace) -> list[Text]:
    """The target's own answers under the coupled rule, all side by side."""
    model, info = target.model, target.model.info
    found: list[Text] = []
    chats = [target.tokenizer.chat([{"role": "user", "content": p}]) for p in prompts]
    chats = [ids for ids in chats if len(ids) <= args.prompt_tokens]
    for at in range(0, len(chats), args.batch):
        part = chats[at : at + args.batch]
        texts = [
            (list(ids), len(ids), parameters(args, rng.key(args.seed, Purpose.CHOICE, at, i) >> 24))
            for i, ids in enumerate(part)
        ]
        slots = [model.open() for _ in texts]
        pipelines = [SamplingPipeline(p, vocab_size=info.vocab_size) for _, _, p in texts]
        running = list(range(len(texts)))
        for _ in range(args.tokens):
            blocks = []
            for i in running:
                start = model.length(slots[i])
                new = tuple(texts[i][0][start:])
                blocks.append(Block(slot=slots[i], start=start, tokens=new, rows=1))
            for i, rows in zip(list(running), model.forward(blocks), strict=True):
                ids, prompt, params = texts[i]
                p = pipelines[i].distribution(rows[0], History(ids[:prompt]))
                ids.append(p.draw(rng.key(params.seed, Purpose.TOKEN, len(ids))))
                if ids[-1] in info.eos_token_ids:
                    running.remove(i)
            if not running:
                break
        for slot in slots:
            model.close(slot)
        found += texts
        say(f"{len(found)}/{len(chats)} answers")
    return found


# ------------------------------------------------------------------------------- examples


def gather(
    target: Loaded, drafter: ModelDrafter, texts: Iterator[Text], wanted: int, draws: int
) -> Examples:
    """Examples from texts until there are `wanted` positions, or no more texts."""
    parts: list[Examples] = []
    positions, told = 0, 0
    for ids, prompt, params in texts:
        if positions >= wanted:
            break
        parts.append(collect(target.model, drafter, ids, prompt, params, draws=draws))
        positions += len(ids) - prompt
        if positions >= told + 500:
            told = positions
            say(f"{drafter.name}: {positions}/{wanted} positions")
    return joined(parts)


def kept(path: Path, makes: Callable[[], Examples]) -> Examples:
    """Examples of a file, made and written where there is none."""
    if path.is_file():
        with np.load(path) as file:
            names = Examples.__dataclass_fields__
            return Examples(**{n: file[n] for n in names})
    found = makes()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, **dataclasses.asdict(found))
    return found


def without_state(examples: Examples) -> Examples:
    """The same guesses, with nothing but log q(x) and H(q) to judge them by."""
    return dataclasses.replace(examples, hidden=np.zeros_like(examples.hidden))


# ------------------------------------------------------------------------------- replay


class Blocks:
    """Blocks of a draft from every place of a text, made once and kept."""

    def __init__(self, drafter: ModelDrafter, text: Text) -> None:
        self.ids, self.prompt, params = text
        self._session = drafter.session(self.prompt, params, Rule.COUPLED)
        self._known: dict[int, tuple[tuple[int, ...], list[DraftSignal]]] = {}

    def at(self, position: int) -> tuple[tuple[int, ...], list[DraftSignal]]:
        if position not in self._known:
            watching = Watching()
            draft = self._session.propose(self.ids[:position], LONGEST, watching)
            self._known[position] = (draft.tokens, list(watching.seen))
        return self._known[position]


def replay(
    controller: Controller, texts: Sequence[Blocks], link: float, args: argparse.Namespace
) -> dict[str, float]:
    """Rounds of all texts, one after the other; the first pass is for learning only."""
    curve, verify = PrefixCurve(), RowCosts(args.verify)
    for measured in (False, True):
        seconds = tokens = drafted = rounds = accepted = 0.0
        for blocks in texts:
            at = blocks.prompt
            while at < len(blocks.ids):
                known = Estimates(
                    round_trip=link, draft=args.draft_ms / 1e3, verify=verify, curve=curve
                )
                room = min(LONGEST, len(blocks.ids) - at)
                decision = controller.decide(Observation(now=0.0, room=room, estimates=known))
                made, signals = blocks.at(at) if decision.length else ((), [])
                count = length_of(controller, signals, min(decision.length, len(made)))
                stands = 0
                while stands < count and made[stands] == blocks.ids[at + stands]:
                    stands += 1
                new = min(stands + 1, len(blocks.ids) - at)
                spent = count * known.draft + link + verify.seconds(count + 1)
                curve.observe(drafted=count, accepted=stands)
                controller.observe(
                    Outcome(
                        decision=decision,
                        drafted=count,
                        accepted=stands,
                        strict=stands,
                        tokens=new,
                        seconds=spent,
                    ),
                    0.0,
                )
                seconds, tokens, drafted = seconds + spent, tokens + new, drafted + count
                at, rounds, accepted = at + new, rounds + 1, accepted + stands
        if measured:
            return {
                "ms_per_token": 1e3 * seconds / tokens,
                "drafts_per_round": drafted / rounds,
                "tokens_per_round": tokens / rounds,
                "accepted": accepted / max(1.0, drafted),
            }
    raise AssertionError


def length_of(controller: Controller, signals: Sequence[DraftSignal], most: int) -> int:
    """Where the controller's rule ends a block that could have `most` tokens. A token that ended
    the text was never shown to a rule."""
    rule = controller.stop_rule()
    if rule is None:
        return most
    rule.start()
    ends = (i + 1 for i, signal in enumerate(signals[:most]) if rule.stop(signal))
    return next(ends, most)


def compare(head: Path, texts: Sequence[Blocks], args: argparse.Namespace) -> dict[str, Any]:
    plain: dict[str, Callable[[], Controller]] = {
        f"fixed {k}": lambda k=k: make("fixed", ControllerFacts(fixed_length=k))
        for k in range(1, LONGEST + 1)
    }

    def facts(**options: float) -> ControllerFacts:
        return ControllerFacts(max_length=LONGEST, options=options, calibration=str(head))

    made = plain | {
        "adaedl": lambda: make("adaedl", facts()),
        "adaedl, lambda 0 kept": lambda: make("adaedl", facts(**{"lambda": 0.0, "epsilon": 0.0})),
        "specdecpp": lambda: make("specdecpp", facts()),
        "specdecpp .3": lambda: make("specdecpp", facts(threshold=0.3)),
    }
    return {
        f"{1e3 * link:g} ms": {n: replay(c(), texts, link, args) for n, c in made.items()}
        for link in args.links
    }


# ------------------------------------------------------------------------------- main


def points(text: str) -> list[tuple[int, float]]:
    """'1:30,9:32' (rows: milliseconds) to rows and seconds."""
    pairs = (part.split(":") for part in text.split(","))
    return [(int(rows), float(ms) / 1e3) for rows, ms in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", default="large")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("stop-head-cache"))
    parser.add_argument("--positions", type=int, default=6000, help="to train on")
    parser.add_argument("--articles", type=int, default=24, help="cnn_dailymail prompts in them")
    parser.add_argument("--draws", type=int, default=3, help="guesses a training position")
    parser.add_argument("--held-out", type=int, default=30, help="prompts to measure on")
    parser.add_argument("--tokens", type=int, default=48, help="most output tokens a text")
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draft-ms", type=float, default=10.0)
    parser.add_argument("--verify", type=points, default="1:60,9:66", help="rows:ms,...")
    parser.add_argument(
        "--links", type=lambda t: [float(x) / 1e3 for x in t.split(",")], default="0,20,100,300"
    )
    parser.add_argument("--replay-texts", type=int, default=30)
    args = parser.parse_args()
    target = load_target("builtin:smollm2", deterministic=False, threads=args.threads)
    drafter = load_drafter(args.draft, target, threads=args.threads, max_slots=args.held_out + 2)
    assert isinstance(drafter, ModelDrafter)
    say("loaded")
    own: list[Text] = []

    def held_out_texts() -> list[Text]:
        if not own:
            own.extend(answers(target, [p for _, p in mixed(args.held_out)], args))
        return own

    def training() -> Examples:
        articles = answers(target, article_prompts()[: args.articles], args)
        fresh = gather(target, drafter, iter(articles), args.positions, args.draws)
        left = args.positions - len(fresh) // args.draws
        return joined([fresh, gather(target, drafter, corpus_texts(args), left, args.draws)])

    folder = args.cache / args.draft
    train = kept(folder / "train.npz", training)
    test = kept(
        folder / "test.npz",
        lambda: gather(target, drafter, iter(held_out_texts()), 10**9, 1),
    )
    say(f"{len(train)} guesses to train on, {len(test)} held out")
    head = train_head(
        train,
        draft=args.draft,
        config=HeadConfig(seed=args.seed),
        target="builtin:smollm2",
        data=f"{args.articles} cnn_dailymail prompts, smollm2_corpus; {args.positions} positions, "
        f"{args.draws} guesses each",
        temperature=args.temperature,
        examples_seed=args.seed,
    )
    blind = train_head(without_state(train), draft=args.draft, config=HeadConfig(seed=args.seed))
    found: dict[str, Any] = {
        "train": {"guesses": len(train), "label": float(train.label.mean())},
        "head": figures(predictions(head, test), test),
        "no state": figures(predictions(blind, without_state(test)), test),
        "q(x)": figures(test.log_q.astype(np.float64), test, calibrated=False),
        "entropy": figures(-test.entropy.astype(np.float64), test, calibrated=False),
    }
    say(json.dumps({k: {n: v[n] for n in v if n != "calibration"} for k, v in found.items()}))
    brief = {k: found["head"][k] for k in ("guesses", "stood", "auc", "brier", "base")}
    head = dataclasses.replace(head, about={**head.about, "held_out": brief})
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.draft}.head.npz"
    path.write_bytes(head.to_bytes())
    if args.replay_texts:
        texts = [Blocks(drafter, text) for text in held_out_texts()[: args.replay_texts]]
        found["replay"] = compare(path, texts, args)
        found["replay_tokens"] = sum(len(t.ids) - t.prompt for t in texts)
        found["replay_times"] = {"draft_ms": args.draft_ms, "verify": args.verify}
    text = json.dumps(found, indent=1)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
