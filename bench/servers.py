"""What a verify costs on a running server: k + 1 prompts with its cache on, and `prompt_logprobs`.

Each round judges k drafts behind the same context, other drafts each time, so that no server has
them in its cache; the context it had before. `prompt_logprobs` asks for the same rows in one
prompt, which vLLM then computes whole.

    python bench/servers.py http://127.0.0.1:8000 --contexts 200,2000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence

from outrider.engines.base import ServerError
from outrider.engines.remote import RemoteSpec, chosen, make_way
from outrider.engines.remote_http import Endpoint
from outrider.engines.remote_ways import COMPLETIONS, NEUTRAL, Ask

IDS = range(1000, 20_000)
"""Made-up texts are of these: ordinary tokens of every vocabulary of some size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--model", help="which of the server's models")
    parser.add_argument("--contexts", default="200,2000")
    parser.add_argument("--drafts", default="0,1,2,4,8")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-scoring", action="store_true", help="leave prompt_logprobs out")
    args = parser.parse_args()
    server = Endpoint(args.url)
    wanted = RemoteSpec(way="vllm", url=args.url, model="MODEL", served=args.model)
    model = str(chosen(server, wanted)["id"])
    source = random.Random(args.seed)
    facts: dict[str, object] = {
        "model": model,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "unit": "ms: median, minimum",
    }
    for size in (int(text) for text in args.contexts.split(",")):
        context = tuple(source.choices(IDS, k=size))
        for count in (int(text) for text in args.drafts.split(",")):
            for name, ask in (("prompts", by_prompts), ("prompt_logprobs", by_scoring)):
                if name != "prompts" and (not count or args.no_scoring):
                    continue
                key = f"{name}, context {size}, {count} drafts"
                try:
                    facts[key] = timed(ask(server, model), context, count, args.repeat, source)
                except ServerError as error:
                    facts[key] = str(error)
                print(f"{key}: {facts[key]}", flush=True)
    facts["load after"] = round(os.getloadavg()[0], 1)
    print(json.dumps(facts))


def timed(
    ask: Callable[[tuple[int, ...], tuple[int, ...]], None],
    context: tuple[int, ...],
    drafts: int,
    repeat: int,
    source: random.Random,
) -> list[float]:
    """Median and least milliseconds of a round; the first, which fills caches, is left out."""
    spent = []
    for _ in range(repeat + 1):
        guess = tuple(source.choices(IDS, k=drafts))
        began = time.perf_counter()
        ask(context, guess)
        spent.append(1e3 * (time.perf_counter() - began))
    return [round(statistics.median(spent[1:]), 1), round(min(spent[1:]), 1)]


def by_prompts(server: Endpoint, model: str) -> Callable[[tuple[int, ...], tuple[int, ...]], None]:
    """As the `vllm:` target asks."""
    way = make_way("vllm", server, model)

    def ask(context: tuple[int, ...], drafts: tuple[int, ...]) -> None:
        (rows,) = way.rows([Ask(slot=0, context=context, drafts=drafts)])
        assert len(rows) == len(drafts) + 1

    return ask


def by_scoring(server: Endpoint, model: str) -> Callable[[tuple[int, ...], tuple[int, ...]], None]:
    """One prompt whose own log-probabilities are asked for."""

    def ask(context: Sequence[int], drafts: Sequence[int]) -> None:
        body = {
            "model": model,
            "prompt": (*context, *drafts),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 1,
            "logprobs": 1,
            "stream": False,
        }
        choice = server.post(COMPLETIONS, body | NEUTRAL)["choices"][0]
        told = choice.get("prompt_logprobs") or ()
        if len(told) != len(context) + len(drafts):
            raise ServerError(f"prompt_logprobs of {len(told)} positions: the server has none")

    return ask


if __name__ == "__main__":
    main()
