"""Controllers by name: one line each.

A factory takes `ControllerFacts` and returns a fresh controller. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final

from outrider.control.base import Controller, ControllerFacts
from outrider.core.tokens import ParameterError

Factory = Callable[[ControllerFacts], Controller]

CONTROLLERS: Final[dict[str, str]] = {
    "fixed": "outrider.control.fixed:Fixed",
    "never": "outrider.control.fixed:Never",
    "specstop": "outrider.control.specstop:SpecStop",
    "markov": "outrider.control.markov:Markov",
    "auto": "outrider.control.auto:Auto",
    "credit": "outrider.control.credit:Credit",
    "adaedl": "outrider.control.stops:AdaEdl",
    "specdecpp": "outrider.control.stops:SpecDecPlusPlus",
    "naive-ucb": "outrider.control.bandits:NaiveUcb",
    "exp3": "outrider.control.bandits:Exp3",
    "ucb-specstop": "outrider.control.ucb:UcbSpecStop",
    "ucb-scaled": "outrider.control.ucb:UcbScaled",
    "contextual": "outrider.control.ucb:Contextual",
}
"""Name to 'module:factory'."""


def parse(text: str) -> tuple[str, dict[str, float]]:
    """'name' or 'name:option=number,...' as people write it. Raises ParameterError; the policy
    itself says which options it has when it is made."""
    name, colon, rest = text.partition(":")
    options: dict[str, float] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = item.partition("=")
        try:
            if not (equals and key.strip()):
                raise ValueError
            options[key.strip()] = float(value)
        except ValueError:
            raise ParameterError(
                "controller", f"takes NAME or NAME:OPTION=NUMBER,...; got {text!r}"
            ) from None
    if name not in CONTROLLERS:
        known = ", ".join(CONTROLLERS)
        raise ParameterError("controller", f"must be one of {known}; got {name!r}")
    return name, options


def make(name: str, facts: ControllerFacts | None = None) -> Controller:
    """A fresh controller. Raises ParameterError for an unknown name or option."""
    where = CONTROLLERS.get(name)
    if where is None:
        known = ", ".join(CONTROLLERS)
        raise ParameterError("controller", f"must be one of {known}; got {name!r}")
    module, _, factory = where.partition(":")
    controller: Controller = getattr(import_module(module), factory)(facts or ControllerFacts())
    return controller
