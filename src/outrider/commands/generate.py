"""`outrider generate`: one prompt, one answer, streamed."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from outrider.commands import console, models, remote
from outrider.commands.errors import CommandError
from outrider.commands.options import (
    DEFAULT_BUDGET,
    DEFAULT_DRAFT_LENGTH,
    DEFAULT_MAX_TOKENS,
    DEFAULT_TARGET,
    DEFAULT_TEMPERATURE,
    DEFAULT_THRESHOLD,
    LENGTH,
    NETWORK,
    OUTPUT,
    SAMPLING,
    SPECULATION,
    Budget,
    CaFile,
    Cloud,
    ControllerOption,
    Deterministic,
    Device,
    Draft,
    DraftLength,
    Dtype,
    DtypeOption,
    Growth,
    Insecure,
    Json,
    LinkOption,
    MinP,
    RelaxRuleOption,
    ScheduleOption,
    SketchOption,
    Target,
    Temperature,
    Threads,
    Threshold,
    TokenFile,
    TopK,
    TopKReplyOption,
    TopP,
    TvBudget,
    Verify,
    Window,
    sampling,
)
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.reasons import why
from outrider.core.relaxation import DEFAULT_SKETCH, Relaxation
from outrider.core.relaxed import Policy, RelaxedRule
from outrider.core.residual import DEFAULT_TOP_K, TopKReply
from outrider.core.tokens import Rule, SamplingParams
from outrider.session.schedules import DEFAULT_GROWTH, DEFAULT_WINDOW, ROUNDS, Schedule

RELAX_OPTIONS: Final = ("relax_rule", "threshold", "budget", "sketch")
"""Of --verify relaxed alone."""
REPLY_OPTIONS: Final = ("top_k_reply", "tv_budget")
"""Of --verify ratio through a verifier alone."""


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The question or text; - reads it from stdin.")],
    target: Target = DEFAULT_TARGET,
    draft: Draft = None,
    dtype: DtypeOption = Dtype.AUTO,
    device: Device = "auto",
    deterministic: Deterministic = True,
    threads: Threads = None,
    verify: Annotated[
        Verify,
        typer.Option(
            metavar="RULE",
            help="Acceptance rule. coupled: same seed, same text as the target alone. ratio: "
            "the same distribution, usually a few more guesses accepted. relaxed: lossy, "
            "see below.",
            rich_help_panel=SPECULATION,
        ),
    ] = Verify.COUPLED,
    draft_length: DraftLength = DEFAULT_DRAFT_LENGTH,
    top_k_reply: TopKReplyOption = None,
    tv_budget: TvBudget = 0.0,
    relax_rule: RelaxRuleOption = RelaxedRule.RELAXED,
    threshold: Threshold = DEFAULT_THRESHOLD,
    budget: Budget = DEFAULT_BUDGET,
    sketch: SketchOption = DEFAULT_SKETCH,
    temperature: Temperature = DEFAULT_TEMPERATURE,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Annotated[
        float, sampling("--repetition-penalty", "Above 1: tokens seen before lose; 1 = off.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, sampling("--presence-penalty", "Taken once from tokens in the answer; 0 = off.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, sampling("--frequency-penalty", "Taken for each occurrence so far; 0 = off.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=BIAS",
            help="Add BIAS (-100 to 100) to a token id; may be repeated.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Same seed, same text. Left out, one is drawn and shown.",
            show_default=False,
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", help="At most this many tokens.", rich_help_panel=LENGTH)
    ] = DEFAULT_MAX_TOKENS,
    min_tokens: Annotated[
        int,
        typer.Option(metavar="N", help="No end of text before this many.", rich_help_panel=LENGTH),
    ] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="End the text before this string; may be repeated.",
            rich_help_panel=LENGTH,
        ),
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Answer with JSON of this schema and nothing else (needs outrider[grammar]).",
            show_default=False,
            rich_help_panel=LENGTH,
        ),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Answer with a text that this expression matches as a whole (likewise).",
            show_default=False,
            rich_help_panel=LENGTH,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            metavar="",
            help="Go on past the model's own end.",
            rich_help_panel=LENGTH,
        ),
    ] = False,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            metavar="",
            help="Continue the prompt as it is, no chat template.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="System message of the chat.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --json: log-probability of each token and N alternatives (0 to 20).",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    cloud: Cloud = None,
    schedule: ScheduleOption = Schedule.FREERUN,
    window: Window = DEFAULT_WINDOW,
    growth: Growth = DEFAULT_GROWTH,
    controller: ControllerOption = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            help="What outrider calibrate wrote, for --controller credit.",
            show_default=False,
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    link: LinkOption = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write one JSON line a round: when its tokens came, who wrote each.",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer a prompt, streamed as it comes; a draft model guesses ahead, the target decides.

    Examples:

    ```
    outrider generate "Why is the sky blue?"
    outrider generate - --max-tokens 100 < question.txt
    outrider generate "Count to ten" --temperature 0 --draft-length 8
    outrider generate "Tell me a story" --seed 7 --json
    outrider generate "Once upon a time" --raw --target ./my-model
    outrider generate "A yes or no question: is ice cold?" --regex "yes|no"
    outrider generate "Why is the sky blue?" --cloud ws://127.0.0.1:8765 --link rtt=50ms
    ```
    """
    if logprobs is not None and not as_json:
        raise CommandError("--logprobs is shown only with --json: add --json")
    if raw and system is not None:
        raise CommandError("--system belongs to the chat template: leave --raw or --system out")
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_parse_bias(logit_bias or []),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        grammar=_grammar(json_schema, regex),
        seed=secrets.randbelow(2**32) if seed is None else seed,
    )
    rule = Rule(verify.value)
    given = given_options(context, "draft_length", *RELAX_OPTIONS, *REPLY_OPTIONS)
    relaxation = None
    if rule is Rule.RELAXED:
        policy = Policy(rule=relax_rule, threshold=threshold)
        relaxation = Relaxation(policy=policy, budget=budget, sketch=sketch)
    _refuse_relaxing(rule, schedule, given)
    _refuse_replies(rule, schedule, given, remotely=cloud is not None, drafts=bool(draft_length))
    if top_k_reply is None:
        top_k_reply = DEFAULT_TOP_K if tv_budget else 0
    chosen = choose_controller(
        controller,
        schedule,
        drafts=bool(draft_length) and draft != "none",
        adapts=rule is Rule.RELAXED and relax_rule is RelaxedRule.E2SCI,
        fixed="draft_length" in given,
    )
    text = read_prompt(prompt)
    if cloud is not None and schedule is not Schedule.EDGE_ONLY:
        if dtype is not Dtype.AUTO or not deterministic:
            raise CommandError(
                "--dtype and --no-deterministic are the verifier's: give them to outrider cloud"
            )
        if not draft_length and schedule is Schedule.COLOCATED:
            raise CommandError("--draft-length 0 leaves colocated nothing to draft")
        remote.answer(
            remote.Remote(
                url=cloud,
                schedule=schedule if draft_length else Schedule.CLOUD_ONLY,
                window=window,
                draft_length=draft_length or 1,
                growth=growth,
                controller=chosen,
                calibration=calibration,
                link=link,
                token_file=token_file,
                ca_file=ca_file,
                trace=trace,
                insecure=insecure,
            ),
            remote.Question(
                target=target,
                draft=draft,
                device=device,
                threads=threads,
                text=text,
                raw=raw,
                system=system,
                params=params,
                rule=rule,
                relaxation=relaxation,
                reply=TopKReply(k=top_k_reply, budget=tv_budget),
            ),
            as_json=as_json,
        )
        return
    _refuse_network(
        schedule,
        {
            "--controller": None if controller in (None, "fixed") else controller,
            "--calibration": calibration,
            "--link": link,
            "--trace": trace,
            "--token-file": token_file,
            "--ca-file": ca_file,
            "--insecure": insecure or None,
            "--window": None if window == DEFAULT_WINDOW else window,
            "--growth": None if growth == DEFAULT_GROWTH else growth,
        },
    )
    if cloud is not None:
        raise CommandError("--schedule edge-only asks no verifier: leave --cloud out")
    if schedule is Schedule.EDGE_ONLY:
        pair = models.load_edge_only(target=target, draft=draft, device=device, threads=threads)
    else:
        pair = models.load(
            target=target,
            draft=draft,
            draft_length=draft_length,
            dtype=dtype,
            device=device,
            deterministic=deterministic,
            threads=threads,
        )
    stream = pair.stream(
        pair.encode(text, raw=raw, system=system), params, rule, draft_length, relaxation
    )
    alone = schedule is Schedule.EDGE_ONLY
    if as_json:
        for _ in stream:
            pass
        console.print_json(
            stream.result.as_dict() | ({"schedule": schedule.value} if alone else {})
        )
        return
    show(stream)
    note = " · edge-only: the draft's own text, not the target's" if alone else ""
    console.messages().print(models.summary(stream.result) + note, style="dim", markup=False)


def _grammar(schema: Path | None, regex: str | None) -> Grammar | None:
    """What the answer has to be; None: anything."""
    if schema is not None and regex is not None:
        raise CommandError("--json-schema and --regex are two grammars: give one of them")
    if regex is not None:
        return Grammar(kind=GrammarKind.REGEX, text=regex)
    if schema is None:
        return None
    try:
        return Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise CommandError(f"--json-schema: {schema} cannot be read: {why(error)}") from None


def given_options(context: typer.Context, *names: str) -> set[str]:
    """Those of the options that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _refuse_relaxing(rule: Rule, schedule: Schedule, given: set[str]) -> None:
    """Options of relaxing where nothing is relaxed are a mistake, not a wish."""
    odd = sorted(given.intersection(RELAX_OPTIONS))
    if rule is Rule.RELAXED and schedule is Schedule.EDGE_ONLY:
        raise CommandError("edge-only judges nothing: leave --verify relaxed out")
    if rule is not Rule.RELAXED and odd:
        names = ", ".join("--" + name.replace("_", "-") for name in odd)
        raise CommandError(f"{names}: only with --verify relaxed")


def _refuse_replies(
    rule: Rule, schedule: Schedule, given: set[str], *, remotely: bool, drafts: bool
) -> None:
    """Options of the residual dialogue where there is none."""
    odd = sorted(given.intersection(REPLY_OPTIONS))
    if not odd:
        return
    names = ", ".join("--" + name.replace("_", "-") for name in odd)
    if rule is not Rule.RATIO:
        raise CommandError(f"{names}: only with --verify ratio")
    if not remotely:
        raise CommandError(
            f"{names}: only with --cloud; in one process the exact token costs nothing more"
        )
    if schedule in remote.NO_DRAFTER or not drafts:
        raise CommandError(f"{names}: only where the edge sends guesses that may fall")


def choose_controller(
    asked: str | None, schedule: Schedule, *, drafts: bool, adapts: bool, fixed: bool
) -> str:
    """Who decides how many guesses. Not asked for: `auto` in the schedules of K guesses and a wait,
    where a length that does not fit costs most, unless a length was given; `credit` where T is to
    adapt."""
    if asked is None:
        if adapts:
            return "credit"
        return "auto" if schedule in ROUNDS and not fixed else "fixed"
    name, _, _ = asked.partition(":")
    if name != "fixed" and (schedule in remote.NO_DRAFTER or not drafts):
        raise CommandError(f"--controller {name} decides about guesses, and there are none here")
    if adapts and name != "credit":
        raise CommandError("--relax-rule e2sci adapts T by --controller credit: leave it to that")
    return asked


def _refuse_network(schedule: Schedule, given: dict[str, object]) -> None:
    """Nothing that was asked for is passed over in silence."""
    for option, value in given.items():
        if value is not None:
            raise CommandError(f"{option} needs a network: give --cloud, and no edge-only schedule")
    if schedule not in (Schedule.FREERUN, Schedule.EDGE_ONLY):
        raise CommandError(f"--schedule {schedule.value} needs a verifier: give --cloud")


def show(stream: Any) -> None:
    """Text to stdout as it comes; Ctrl-C ends it, and what was printed stays."""
    try:
        for step in stream:
            sys.stdout.write(step.text)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def read_prompt(argument: str) -> str:
    """The prompt itself, from the command line or stdin; refuses what cannot be encoded."""
    try:
        text = sys.stdin.read().removesuffix("\n") if argument == "-" else argument
        text.encode("utf-8")
    except UnicodeError:
        raise CommandError("the prompt is not valid UTF-8 text: convert it first") from None
    if not text:
        raise CommandError('the prompt is empty: give a text, as in outrider generate "Hello"')
    return text


def _parse_bias(items: list[str]) -> dict[int, float]:
    bias = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise CommandError(
                f"--logit-bias takes ID=BIAS with two numbers, as in 42=-100; got {item!r}"
            ) from None
    return bias
