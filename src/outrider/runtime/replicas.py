"""Several verifiers behind one address, on Ray Serve (extra `ray`).

Ray starts the replicas, restarts the ones that die, takes the edges' connections and routes each by
its affinity header; every replica is `runtime.asgi` over a whole CloudRuntime. Nothing is shared:
an edge whose replica goes opens its sessions anew on another one, with what is committed (I4).

Rules:

1. A replica that Ray has begun to stop drains: GOAWAY to its edges, answers that run may end, then
   its connections close, which is what Ray waits for. Ray tells a replica nothing of that kind, so
   it asks Ray for its own state, every LOOK_S seconds. If it gets no answer it goes on serving, and
   Ray cuts it off when the time to drain is over: slower, and no token is lost either.
2. The first replica starts alone. What it takes tells whether all of them have room.
3. Replicas are replaced one after the other, and the old one stops before the new one loads, since
   two may not fit: with N replicas N - 1 serve meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.runtime.asgi import CloudApp
from outrider.runtime.listening import MAX_SOCKETS
from outrider.runtime.routes import AFFINITY_HEADER
from outrider.runtime.serving import Settings, application

log = logging.getLogger("outrider.replicas")

NAME: Final = "outrider"
"""Of the application, and of its one deployment."""
LOOK_S: Final = 0.5
"""Between two questions of a replica whether it is being stopped."""
BEHIND_DRAIN_S: Final = 5.0
"""Ray cuts a replica off so long after the time to drain."""
HEALTH_PERIOD_S: Final = 2.0
HEALTH_TIMEOUT_S: Final = 10.0
"""Of a replica that does not answer Ray; one that died is found out at once."""
ROOM_LEFT: Final = 0.05
"""Part of the memory that stays free: Ray kills processes above 95 %."""


class ReplicasError(RuntimeError):
    """The replicas did not come up; the message says why, and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where Ray's proxy listens."""

    host: str
    port: int
    certificate: Path | None = None
    private_key: Path | None = None


class Replicas:
    """`count` verifiers on a Ray of their own, on this machine. Blocking: for a thread."""

    def __init__(self, settings: Settings, count: int, where: Listening) -> None:
        """Raises ModuleNotFoundError where there is no Ray."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ["RAY_SERVE_SESSION_ID_HEADER_KEY"] = AFFINITY_HEADER
        import ray
        from ray import serve

        self._ray, self._serve = ray, serve
        self._settings = settings
        self._count = count
        self._where = where
        self._update = 0
        """Counts up: by another version Ray replaces what runs."""

    def start(self) -> None:
        """Start Ray, one replica, and the others when there is room. Raises ReplicasError."""
        try:
            self._ray.init(
                address="local",
                namespace=NAME,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # noqa: BLE001 - it raises bare Exceptions
            raise ReplicasError(
                f"Ray did not start ({_last_line(str(error))}); on a busy machine try again, its "
                "logs are in /tmp/ray/session_latest/logs"
            ) from None
        where = self._where
        # Ray's own loggers write to stderr whatever we ask for.
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        tls = {}
        if where.certificate is not None:
            tls = {"ssl_certfile": str(where.certificate), "ssl_keyfile": str(where.private_key)}
        self._serve.start(
            proxy_location="HeadOnly",
            http_options={"host": where.host, "port": where.port, **tls},
        )
        self._deploy(self._settings, 1)
        self._require_room()
        if self._count > 1:
            self._deploy(self._settings, self._count)

    def update(self, settings: Settings) -> None:
        """Replace the replicas one by one. Raises ReplicasError; those before then stay."""
        self._update += 1
        try:
            self._deploy(settings, self._count)
        except ReplicasError:
            self._update += 1
            with contextlib.suppress(ReplicasError):
                self._deploy(self._settings, self._count)
            raise
        self._settings = settings

    def drain(self) -> None:
        """Stop the replicas, each with its time to drain."""
        self._serve.delete(NAME, _blocking=True)

    def stop(self) -> None:
        """End every process at once. Safe to call twice."""
        self._ray.shutdown()

    @property
    def running(self) -> list[Mapping[str, Any]]:
        """Ray's facts of the replicas (`replica_id`, `pid`, `state`, ...)."""
        return _replicas()

    def _deploy(self, settings: Settings, count: int) -> None:
        version = str(self._update)
        try:
            self._serve.run(
                deployment(settings, count, version=version), name=NAME, route_prefix="/"
            )
        except RuntimeError as error:
            raise ReplicasError(f"no replica came up: {_last_line(str(error))}") from None

    def _require_room(self) -> None:
        """Raises ReplicasError where so many replicas as the first do not fit."""
        taken = [_resident(r["pid"]) for r in self.running if r.get("pid")]
        free = _available()
        if not taken or not free:
            return  # no Linux: nobody says
        more = self._count - len(taken)
        left = int(free * (1 - ROOM_LEFT))
        if more * max(taken) > left:
            most = len(taken) + left // max(taken)
            raise ReplicasError(
                f"{self._count} replicas do not fit: one takes {max(taken) / 2**30:.1f} GiB, and "
                f"{free / 2**30:.1f} GiB are free: --replicas {most} fits"
            )


def deployment(settings: Settings, count: int, *, version: str | None = None) -> Any:
    """The application that Ray Serve runs. `version`: what has another one is replaced; None: Ray
    decides. RAY_SERVE_SESSION_ID_HEADER_KEY must name AFFINITY_HEADER where the proxy runs."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

    def build() -> CloudApp:  # Ray takes a function and nothing else that can be called
        return _replica(settings)

    verifier = serve.ingress(build)()
    made = serve.deployment(
        verifier,
        name=NAME,
        num_replicas=count,
        max_ongoing_requests=MAX_SOCKETS,  # each connection is one, and the other routes
        graceful_shutdown_timeout_s=settings.drain + BEHIND_DRAIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
        ray_actor_options={"num_cpus": 0},  # threads are --threads' to say
    )
    # Ray gives each deployment a version of its own, and what has another is replaced: more
    # replicas alone would start the first one anew. Its public interface has no way to say so.
    if version is not None:
        made._version = version
    return made.bind()


def _replica(settings: Settings) -> CloudApp:
    """In the replica's process: a verifier that notices when Ray stops it."""
    app = application(settings)
    own = app.beside

    async def beside() -> None:
        async with asyncio.TaskGroup() as tasks:
            if own is not None:
                tasks.create_task(own())
            tasks.create_task(_drain_when_stopped(app, settings.drain))

    app.beside = beside
    return app


async def _drain_when_stopped(app: CloudApp, drain: float) -> None:
    from ray import serve

    context = serve.get_replica_context()
    me = context.replica_id.unique_id
    while not await asyncio.to_thread(_is_stopping, me, context.app_name):
        await asyncio.sleep(LOOK_S)
    await app.cloud.stop(drain=drain)


def _is_stopping(replica: str, app: str) -> bool:
    try:
        found = _replicas(app)
        return any(r["replica_id"] == replica and r["state"] == "STOPPING" for r in found)
    except Exception as error:  # noqa: BLE001 - Ray's own, while its controller is away
        log.info("Ray does not say whether this replica is stopped: %s", type(error).__name__)
        return False


def _replicas(app: str = NAME) -> list[Mapping[str, Any]]:
    from ray.serve.context import _get_global_client

    found = _get_global_client().get_serve_details()
    deployments = found.get("applications", {}).get(app, {}).get("deployments", {})
    return list(deployments.get(NAME, {}).get("replicas", ()))


def _resident(pid: int) -> int:
    return _kilobytes(Path(f"/proc/{pid}/status"), "VmRSS")


def _available() -> int:
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable")


def _kilobytes(file: Path, key: str) -> int:
    """A line of /proc in bytes; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0


def _last_line(text: str) -> str:
    """Of a traceback that Ray hands on."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray does not say why"
