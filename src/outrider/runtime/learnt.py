"""What an edge has learnt of link, engines and acceptance, and the controllers that use it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Final

from outrider.control.base import CalibrationError, Controller
from outrider.control.calibration import Calibration, ModelFacts
from outrider.control.estimators import Estimators
from outrider.control.registry import make as make_controller
from outrider.core.tokens import ParameterError
from outrider.engines.base import ModelInfo
from outrider.engines.drafters import Drafter
from outrider.proto.messages import Hello
from outrider.runtime.edgerequest import EdgeRequest
from outrider.session.pilot import ControlledPilot, Pilot
from outrider.session.schedules import STREAMING, Schedule

MAX_CONTROLLERS: Final = 32
"""Most controllers an edge keeps; the oldest goes first and begins anew when it is asked for."""


@dataclass(slots=True)
class Learnt:
    """Goes on from answer to answer, and from edge to edge with the same draft and target."""

    estimators: Estimators = field(default_factory=Estimators)
    controllers: dict[tuple[object, ...], Controller] = field(default_factory=dict)

    def pilot(
        self, request: EdgeRequest, drafter: Drafter | None, target: ModelFacts | None
    ) -> Pilot | None:
        """The controller's seat for an answer; None where K and W are fixed. Requests with the same
        wishes share one controller. Raises ParameterError for an unknown one, and for a calibration
        of other models than these."""
        if request.controller == "fixed":
            return None
        controller = self._controller(request, drafter)
        _check_calibration(controller, drafter, target)
        return ControlledPilot(
            controller,
            self.estimators,
            streaming=request.schedule in STREAMING,
            free=request.schedule is Schedule.FREERUN,
            now=time.monotonic(),
        )

    def _controller(self, request: EdgeRequest, drafter: Drafter | None) -> Controller:
        name = drafter.name if drafter else ""
        facts = replace(request.facts(), draft=name.rpartition("+")[2])
        key = (
            request.controller,
            request.schedule,
            facts.max_length,
            facts.fixed_length,
            tuple(sorted(facts.options.items())),
            facts.calibration,
        )
        kept = self.controllers
        controller = kept.get(key)
        if controller is None:
            if len(kept) >= MAX_CONTROLLERS:
                kept.pop(next(iter(kept)))
            try:
                controller = make_controller(request.controller, facts)
            except CalibrationError as error:
                raise ParameterError("calibration", str(error)) from None
            kept[key] = controller
        return controller


def target_facts(peer: Hello | None, believed: ModelInfo | None) -> ModelFacts | None:
    """The target as the cloud greeted with it, or as it is believed to be until then: the first
    answer begins before the cloud has said its name."""
    if peer is not None:
        return ModelFacts(name=peer.model, vocabulary=peer.fingerprint, dtype="", parameters=0)
    return None if believed is None else _model_facts(believed)


def _check_calibration(
    controller: Controller, drafter: Drafter | None, target: ModelFacts | None
) -> None:
    """What was measured on another pair of models says nothing about this one."""
    calibration = getattr(controller, "calibration", None)
    if not isinstance(calibration, Calibration):
        return
    model = getattr(drafter, "model", None)
    draft = None if model is None else _model_facts(model.info)
    try:
        calibration.require(target=target, draft=draft)
    except CalibrationError as error:
        raise ParameterError("calibration", str(error)) from None


def _model_facts(info: ModelInfo) -> ModelFacts:
    return ModelFacts(
        name=info.name,
        vocabulary=info.fingerprint,
        dtype=info.dtype,
        parameters=info.parameters,
    )
