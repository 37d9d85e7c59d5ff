"""`outrider plan`: what each way to decode would take and cost here, before deployment."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.commands import console, planfacts, planfleet, planreport
from outrider.commands.errors import CommandError
from outrider.commands.options import CaFile, Insecure, Json, LinkOption, Threads, TokenFile
from outrider.commands.planfacts import GIVEN, Known
from outrider.commands.traces import (
    RECORDING,
    DraftOption,
    Recording,
    TargetOption,
    TemperatureOption,
    TokensOption,
    TracesOption,
    bars,
    calibration_errors,
    obtain,
)
from outrider.core.tokens import Rule
from outrider.plan.choose import WEIGHT, Objective, Survey
from outrider.plan.facts import MAX_ALPHA, Curve, Facts, Prices

TIMES = "Times (a bare number is in milliseconds)"
ACCEPTANCE = "Acceptance"
MEASURING = "Measuring instead"
PRICES = "Prices and power (0: nobody said)"
SHARING = "Sharing"
SHOWING = "Output"


class PlannedRule(StrEnum):
    COUPLED = "coupled"
    RATIO = "ratio"


def _time(text: str) -> Any:
    return typer.Option(metavar="TIME", help=text, show_default=False, rich_help_panel=TIMES)


def _price(text: str) -> Any:
    return typer.Option(metavar="X", min=0.0, max=1e9, help=text, rich_help_panel=PRICES)


def plan(
    rtt: Annotated[str | None, _time("Round trip of the link, as in 50ms.")] = None,
    t_draft: Annotated[str | None, _time("The edge drafts a token.")] = None,
    t_verify: Annotated[
        str | None,
        _time("A forward of the target: one time for any rows, or a table by rows, 1:60,9:72."),
    ] = None,
    t_plain: Annotated[str | None, _time("One plain step of the target; else t-verify of 1.")] = (
        None
    ),
    t_draft_cloud: Annotated[
        str | None,
        _time("The cloud drafts a token itself; none: it cannot. Else as at the edge, assumed."),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            metavar="A",
            min=0.0,
            max=MAX_ALPHA,
            help="A guess stands with this probability, whatever stood before.",
            show_default=False,
            rich_help_panel=ACCEPTANCE,
        ),
    ] = None,
    curve: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="S(1), S(2), ...: how often the first k guesses of a block all stand.",
            show_default=False,
            rich_help_panel=ACCEPTANCE,
        ),
    ] = None,
    rule: Annotated[
        PlannedRule,
        typer.Option(metavar="NAME", help="coupled or ratio.", rich_help_panel=ACCEPTANCE),
    ] = PlannedRule.COUPLED,
    link: LinkOption = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            metavar="",
            help="Time target and draft on this machine and record how often guesses stand.",
            rich_help_panel=MEASURING,
        ),
    ] = False,
    cloud: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask the verifier at ws://HOST:PORT: row costs, round trip, and a few answers "
            "with --draft for its speed and acceptance.",
            show_default=False,
            rich_help_panel=MEASURING,
        ),
    ] = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    traces: TracesOption = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="JSONL with prompts; repeatable. Else eight of our own.",
            show_default=False,
            rich_help_panel=RECORDING,
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=10_000, help="Prompts to ask.", rich_help_panel=RECORDING
        ),
    ] = 4,
    max_tokens: TokensOption = 48,
    temperature: TemperatureOption = 0.7,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**62, rich_help_panel=RECORDING)
    ] = 0,
    threads: Threads = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    requests: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=10_000,
            help="Answers at a time an edge.",
            rich_help_panel=SHARING,
        ),
    ] = 1,
    edges: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=1_000_000,
            help="Edges a verifier; with --per-token-ms all there are.",
            rich_help_panel=SHARING,
        ),
    ] = 1,
    per_token_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            min=0.001,
            max=60_000.0,
            help="Say how many verifiers all edges need for a token in this time.",
            show_default=False,
            rich_help_panel=SHARING,
        ),
    ] = None,
    price_second: Annotated[float, _price("Of a second of the verifier's engine.")] = 0.0,
    price_forward: Annotated[float, _price("Of a forward.")] = 0.0,
    price_token: Annotated[float, _price("Of a token that the cloud had a hand in.")] = 0.0,
    price_mb: Annotated[float, _price("Of a megabyte on the link.")] = 0.0,
    edge_watts: Annotated[float, _price("Drawn by the edge while it drafts.")] = 0.0,
    cloud_watts: Annotated[float, _price("Drawn by the verifier while its engine works.")] = 0.0,
    own_text: Annotated[
        bool,
        typer.Option(
            "--own-text",
            metavar="",
            help="The draft's own text would do: the edge alone may be the answer.",
            rich_help_panel=SHARING,
        ),
    ] = False,
    weight: Annotated[
        float,
        typer.Option(
            metavar="GAMMA",
            min=0.0,
            max=1e6,
            help="balanced: seconds of waiting that a second of the cloud's engine is worth.",
            rich_help_panel=SHARING,
        ),
    ] = WEIGHT,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            metavar="",
            help="Show the inequalities with the numbers put in.",
            rich_help_panel=SHOWING,
        ),
    ] = False,
    heatmap: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Draw who wins by round trip and acceptance: .png, .svg or .html.",
            show_default=False,
            rich_help_panel=SHOWING,
        ),
    ] = None,
    objective: Annotated[
        Objective,
        typer.Option(
            metavar="NAME",
            help="Of the heat map: latency, balanced, cost.",
            rich_help_panel=SHOWING,
        ),
    ] = Objective.LATENCY,
    as_json: Json = False,
) -> None:
    """Compare every way to decode before you deploy one, and hear when not to speculate.

    Takes times, acceptance and the link, or measures them, and gives for each schedule at its
    best K: time per token, forwards, bytes, money, energy, capacity, and the round trip up to
    which it pays. Then a recommendation for each objective with its margin. It may say: don't.

    latency is time per token; balanced adds GAMMA times the cloud's engine time; cost is money
    (engine time where nothing has a price) among those no slower than cloud streaming.

    Examples:

    ```
    outrider plan --rtt 50ms --alpha .8 --t-draft 5 --t-verify 60
    outrider plan --rtt 50ms --alpha .8 --t-draft 5 --t-verify 1:60,9:72 --explain
    outrider plan --rtt 50ms --alpha .8 --t-draft 5 --t-verify 60 --edges 500 --per-token-ms 90
    outrider plan --measure --rtt 50ms
    outrider plan --cloud ws://127.0.0.1:8765 --heatmap plan.svg
    ```
    """
    if alpha is not None and curve is not None:
        raise CommandError("--alpha and --curve say the same thing: keep one")
    if measure and cloud:
        raise CommandError("--measure times models here, --cloud asks a verifier: keep one")
    if heatmap is not None:
        from outrider.commands.planpicture import require

        require(heatmap)
    known = Known()
    _given(known, rtt, link, t_draft, t_verify, t_plain, t_draft_cloud, need_link=cloud is None)
    if alpha is not None:
        known.put("curve", Curve.constant(alpha), GIVEN)
    if curve is not None:
        known.put("curve", planfacts.curve_of(curve), GIVEN)
    known.put("requests", requests, GIVEN)
    known.put("edges", edges if per_token_ms is None else 1, GIVEN)
    asked = Recording(
        target=target,
        draft=draft,
        path=traces,
        prompts=prompts or (),
        samples=samples,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        threads=threads,
        built_in=True,
    )
    if measure or traces is not None:
        with calibration_errors(), bars() as told:
            planfacts.from_traces(known, obtain(asked, told))
    if cloud is not None:
        from outrider.commands.plancloud import ask_cloud

        ask_cloud(known, cloud, asked, link, token_file, ca_file, insecure=insecure)
    prices = Prices(
        cloud_second=price_second,
        cloud_forward=price_forward,
        cloud_token=price_token,
        megabyte=price_mb,
        edge_watts=edge_watts,
        cloud_watts=cloud_watts,
    )
    facts = planfacts.facts_of(known, prices=prices, rule=Rule(rule.value), own_text=own_text)
    survey = Survey.of(facts, weight=weight)
    if as_json:
        found = planreport.as_json(survey, known)
        found["picture"] = (
            None if heatmap is None else str(_draw(facts, objective, weight, heatmap))
        )
        if per_token_ms is not None:
            found["verifiers"] = planfleet.as_json(facts, edges, per_token_ms / 1e3)
        console.print_json(found)
        return
    planreport.show(survey, known, explain=explain)
    if per_token_ms is not None:
        planfleet.show(facts, edges, per_token_ms / 1e3, explain=explain)
    if heatmap is not None:
        path = _draw(facts, objective, weight, heatmap)
        console.facts().print(f"{path}: who wins by round trip and acceptance", markup=False)


def _given(
    known: Known,
    rtt: str | None,
    link: str | None,
    t_draft: str | None,
    t_verify: str | None,
    t_plain: str | None,
    t_draft_cloud: str | None,
    *,
    need_link: bool,
) -> None:
    """What the options say."""
    if rtt is not None or link is not None or need_link:
        described = planfacts.link_of(rtt, link)
        known.put("up_bps", described.up_bps, GIVEN)
        known.put("down_bps", described.down_bps, GIVEN)
        if need_link or rtt is not None:
            known.put("round_trip", planfacts.mean_round_trip(described), GIVEN)
    for name, option, text in (
        ("draft", "--t-draft", t_draft),
        ("plain", "--t-plain", t_plain),
    ):
        if text is not None:
            known.put(name, planfacts.duration_of(option, text), GIVEN)
    if t_verify is not None:
        known.put("verify", planfacts.row_times("--t-verify", t_verify), GIVEN)
    if t_draft_cloud is not None:
        none = t_draft_cloud.strip().lower() == "none"
        time = float("inf") if none else planfacts.duration_of("--t-draft-cloud", t_draft_cloud)
        known.put("cloud_draft", time, GIVEN)


def _draw(facts: Facts, objective: Objective, weight: float, path: Path) -> Path:
    from outrider.commands.planpicture import draw

    with bars() as told:
        return draw(facts, objective, path, weight=weight, told=lambda d, w: told("map", d, w))
