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
3. How long a start takes, the machine decides: nobody is given up who still loads. What goes on is
   told every TELL_S seconds, as long as anything does. Ray's own limits are too short for a busy
   machine (it gives its daemons 30 s, and no option): they are made longer where there is one, and
   its start is tried START_TRIES times.
4. Replicas are replaced one after the other, and the old one stops before the new one loads, since
   two may not fit: with N replicas N - 1 serve meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from outrider.runtime.asgi import CloudApp
from outrider.runtime.listening import MAX_SOCKETS
from outrider.runtime.process import worked
from outrider.runtime.routes import AFFINITY_HEADER
from outrider.runtime.serving import Settings, application

log = logging.getLogger("outrider.replicas")

Tell = Callable[[str], None]

NAME: Final = "outrider"
"""Of the application, and of its one deployment."""
LOOK_S: Final = 0.5
"""Between two questions of a replica whether it is being stopped."""
BEHIND_DRAIN_S: Final = 5.0
"""Ray cuts a replica off so long after the time to drain."""
HEALTH_PERIOD_S: Final = 2.0
HEALTH_TIMEOUT_S: Final = 10.0
"""Of a replica that does not answer Ray; one that died is found out at once."""
TELL_S: Final = 5.0
"""Between two looks at what goes on while replicas start or are replaced."""
START_TRIES: Final = 6
"""On two cores at load 8 the third attempt was the first to succeed."""
PATIENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "RAY_gcs_server_request_timeout_seconds": "300",
        "RAY_worker_register_timeout_seconds": "300",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    }
)
"""What Ray is told of time, unless the environment says something else."""
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
        for name, value in (*PATIENT.items(), ("RAY_USAGE_STATS_ENABLED", "0")):
            os.environ.setdefault(name, value)
        os.environ["RAY_SERVE_SESSION_ID_HEADER_KEY"] = AFFINITY_HEADER
        import ray
        from ray import serve

        self._ray, self._serve = ray, serve
        self._settings = settings
        self._count = count
        self._where = where
        self._update = 0
        """Counts up: by another version Ray replaces what runs."""

    def start(self, tell: Tell = lambda _: None) -> None:
        """Start Ray, one replica, and the others when there is room. Raises ReplicasError. `tell`
        is told how far things are, also from another thread."""
        self._start_ray(tell)
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
        tell("Ray runs; a first replica loads")
        self._deploy(self._settings, 1, tell)
        self._require_room()
        if self._count > 1:
            self._deploy(self._settings, self._count, tell)

    def _start_ray(self, tell: Tell) -> None:
        terminate = signal.getsignal(signal.SIGTERM)
        for attempt in range(1, START_TRIES + 1):
            before = children()
            try:
                self._ray.init(
                    address="local",
                    namespace=NAME,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, terminate)  # Ray has put its own in its place
                return
            except Exception as error:  # noqa: BLE001 - it raises bare Exceptions
                why = _last_line(str(error))
            self._ray.shutdown()
            for pid in children() - before:  # of a start that failed, it forgets them
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if attempt < START_TRIES:
                tell(f"Ray did not start ({why}): attempt {attempt + 1} of {START_TRIES}")
        raise ReplicasError(
            f"Ray did not start in {START_TRIES} attempts ({why}); its logs are in "
            "/tmp/ray/session_latest/logs"
        )

    def update(self, settings: Settings, tell: Tell = lambda _: None) -> None:
        """Replace the replicas one by one. Raises ReplicasError; those before then stay."""
        self._update += 1
        try:
            self._deploy(settings, self._count, tell)
        except ReplicasError:
            self._update += 1
            with contextlib.suppress(ReplicasError):
                self._deploy(self._settings, self._count, tell)
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

    def _deploy(self, settings: Settings, count: int, tell: Tell) -> None:
        version = str(self._update)
        over = threading.Event()
        telling = threading.Thread(
            target=self._tell_until, args=(over, count, tell), name="replicas-tell", daemon=True
        )
        telling.start()
        try:
            self._serve.run(
                deployment(settings, count, version=version), name=NAME, route_prefix="/"
            )
        except RuntimeError as error:
            # Of the deployment Ray says what the replica said; of the application, that it failed.
            why = str(_deployed().get("message", "")) or str(error)
            raise ReplicasError(f"no replica came up: {_last_line(why)}") from None
        finally:
            over.set()
            telling.join()

    def _tell_until(self, over: threading.Event, count: int, tell: Tell) -> None:
        """Tell what goes on as long as something does."""
        before = ""
        while not over.wait(TELL_S):
            try:
                found = self.running
            except Exception as error:  # noqa: BLE001 - Ray's own, while its controller is away
                log.info("Ray does not say what its replicas do: %s", type(error).__name__)
                continue
            said = progress(found, count)
            if said != before:
                tell(said)
            before = said

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


def progress(found: Sequence[Mapping[str, Any]], count: int) -> str:
    """How far replicas are, of Ray's facts. It changes as long as those that load do something."""
    serving = sum(facts["state"] == "RUNNING" for facts in found)
    said = f"{serving} of {count} replicas serve"
    for facts in found:
        if facts["state"] != "RUNNING":
            pid = facts.get("pid") or 0
            said += (
                f"; one is {str(facts['state']).lower()}: {worked(pid):.0f} s of processor time, "
                f"{_resident(pid) / 2**30:.1f} GiB"
            )
    return said


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
    return list(_deployed(app).get("replicas", ()))


def _deployed(app: str = NAME) -> Mapping[str, Any]:
    """Ray's facts of the deployment (`status`, `message`, `replicas`, ...)."""
    from ray.serve.context import _get_global_client

    found = _get_global_client().get_serve_details()
    deployments = found.get("applications", {}).get(app, {}).get("deployments", {})
    made: Mapping[str, Any] = deployments.get(NAME, {})
    return made


def children(of: int | None = None) -> set[int]:
    """Processes that a process, or else this one, has started; empty where the system does not
    list them."""
    found = ""
    for task in Path(f"/proc/{of or os.getpid()}/task").glob("*"):
        with contextlib.suppress(OSError):
            found += (task / "children").read_text()
    return set(map(int, found.split()))


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
