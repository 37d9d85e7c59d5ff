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
    "adaedl": "outrider.control.stops:AdaEdl",
    "specdecpp": "outrider.control.stops:SpecDecPlusPlus",
}
"""Name to 'module:factory'."""


def make(name: str, facts: ControllerFacts | None = None) -> Controller:
    """A fresh controller. Raises ParameterError for an unknown name or option."""
    where = CONTROLLERS.get(name)
    if where is None:
        known = ", ".join(CONTROLLERS)
        raise ParameterError("controller", f"must be one of {known}; got {name!r}")
    module, _, factory = where.partition(":")
    controller: Controller = getattr(import_module(module), factory)(facts or ControllerFacts())
    return controller
