"""From settings to a verifier that is ready to serve: models loaded, costs measured, limits set.

`Settings` are plain values, so that they can travel to another process, where `load` makes the
same verifier of them.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.control.costs import RowCosts
from outrider.engines.desk import SlotDesk
from outrider.engines.load import load_drafter, load_target
from outrider.engines.measure import row_costs
from outrider.engines.tokenizer import Tokenizer
from outrider.runtime.access import Logins, read_logins
from outrider.runtime.asgi import CloudApp
from outrider.runtime.cloudruntime import CloudConfig, CloudRuntime, service_config
from outrider.runtime.listening import MAX_CONNECTIONS
from outrider.runtime.rotation import LoginFile
from outrider.session.batching import DEFAULT_STRETCH
from outrider.session.service import MAX_SESSIONS, ServiceConfig

TENANT_PART: Final = 4
"""Where logins are told apart, one may have this part of sessions and connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one verifier is made of."""

    model: str
    draft: str = "none"
    dtype: str = "auto"
    device: str = "auto"
    deterministic: bool = True
    threads: int | None = None
    slots: int = 64
    batch_rows: int = 64
    tenant_sessions: int | None = None
    tenant_stretch: float = DEFAULT_STRETCH
    max_token_s: float = math.inf
    pace: float = 0.0
    token_file: Path | None = None
    drain: float = 30.0
    """Seconds that running answers get when it stops."""

    def logins(self) -> Logins:
        """Raises ConfigurationError, OSError."""
        return read_logins(self.token_file) if self.token_file else Logins()

    def config(
        self,
        logins: Logins,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: Path | None = None,
        private_key: Path | None = None,
        insecure: bool = False,
    ) -> CloudConfig:
        """Raises ConfigurationError."""
        return CloudConfig(
            host=host,
            port=port,
            tokens=logins.tokens,
            limits=logins.limits,
            certificate=certificate,
            private_key=private_key,
            insecure=insecure,
            pace=self.pace,
            tenant_connections=MAX_CONNECTIONS // (TENANT_PART if self.token_file else 1),
        )

    def load(self) -> Parts:
        """Load the models and measure them; seconds to minutes. Raises EngineError, OSError."""
        loaded = load_target(
            self.model,
            dtype=self.dtype,
            device=self.device,
            deterministic=self.deterministic,
            threads=self.threads,
            max_slots=self.slots,
        )
        drafter = load_drafter(
            self.draft, loaded, device=self.device, threads=self.threads, max_slots=self.slots
        )
        limits = service_config(
            loaded.model.info,
            max_batch_rows=self.batch_rows,
            max_sessions_per_tenant=self.tenant_sessions
            or MAX_SESSIONS // (TENANT_PART if self.token_file else 1),
            max_under_way=self.slots,
            stretch=self.tenant_stretch,
            max_token_s=self.max_token_s,
        )
        costs = row_costs(loaded.model, added=self.pace)
        return Parts(
            desk=SlotDesk(loaded.model, drafter),
            tokenizer=loaded.tokenizer,
            service=limits,
            costs=costs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a CloudRuntime, or a CloudServer, is put together from."""

    desk: SlotDesk
    tokenizer: Tokenizer
    service: ServiceConfig
    costs: list[tuple[int, float]]
    """Seconds of a forward by rows, as measured."""


def application(settings: Settings) -> CloudApp:
    """A verifier for any ASGI host, which decides about addresses and certificates. Raises
    ConfigurationError, EngineError, OSError."""
    logins = settings.logins()
    parts = settings.load()
    cloud = CloudRuntime(
        parts.desk, parts.tokenizer, settings.config(logins), service=parts.service
    )
    cloud.service.costs = RowCosts(parts.costs)
    file = settings.token_file
    watch = LoginFile(file, logins, cloud.admit).watch if file else asyncio.Event().wait
    return CloudApp(cloud, drain=settings.drain, beside=watch)  # type: ignore[arg-type]
