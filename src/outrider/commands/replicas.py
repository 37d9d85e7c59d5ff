"""`outrider cloud --replicas N`: the life of several verifiers on Ray Serve, by signals.

SIGTERM   drain all of them, then end
Ctrl-C    end at once; edges resume on the next verifier at the same address
SIGHUP    replace them one by one, with the --config file read again
"""

from __future__ import annotations

import importlib.util
import os
import queue
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.commands import console
from outrider.commands.cloud import end_with_input, parsed, say_listening, settings_of
from outrider.commands.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.runtime.cloudruntime import CloudConfig
    from outrider.runtime.replicas import Replicas
    from outrider.runtime.serving import Settings


def serve_replicas(settings: Settings, config: CloudConfig, count: int, *, until_eof: bool) -> None:
    """Run until a signal ends it. Raises CommandError."""
    if importlib.util.find_spec("ray") is None:
        raise CommandError("--replicas needs Ray Serve: pip install 'outrider[ray]'")
    if config.port == 0:
        raise CommandError("--replicas needs a port in --listen: Ray takes none by itself")
    from outrider.engines.load import load_vocabulary
    from outrider.runtime.replicas import Listening, Replicas, ReplicasError

    load_vocabulary(settings.model)  # a wrong name is told before Ray takes its time
    settings = _shared(settings, count)
    where = Listening(
        host=config.host,
        port=config.port,
        certificate=config.certificate,
        private_key=config.private_key,
    )
    replicas = Replicas(settings, count, where)
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        _end_at_once(until_eof=until_eof)
        with console.progress(f"starting Ray and {count} x {settings.model}") as tell:
            replicas.start(tell)
        _obey_signals(heard)
        say_listening(config, config.port)
        _obey(replicas, count, heard)
    except ReplicasError as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:
        pass  # at once: what was under way is the edges' to resume
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        replicas.stop()


def _shared(settings: Settings, count: int) -> Settings:
    """Unless somebody said otherwise, the replicas share the cores."""
    if settings.threads is not None:
        return settings
    return replace(settings, threads=max(1, (os.cpu_count() or 1) // count))


def _end_at_once(*, until_eof: bool) -> None:
    """While replicas start, whatever ends this process ends Ray, too: left alone, Ray would go on
    loading for nobody."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if until_eof:
        end_with_input()


def _obey_signals(heard: queue.SimpleQueue[str]) -> None:
    """From now on what is asked for from outside is done one after the other. Ctrl-C still ends
    everything at once."""
    signal.signal(signal.SIGTERM, lambda *_: heard.put("drain"))
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda *_: heard.put("update"))


def _obey(replicas: Replicas, count: int, heard: queue.SimpleQueue[str]) -> None:
    while True:
        try:
            wish = heard.get(timeout=0.2)  # a wait without end would not see Ctrl-C everywhere
        except queue.Empty:
            continue
        if wish == "drain":
            replicas.drain()
            return
        _update(replicas, count, sys.argv[1:])


def _update(replicas: Replicas, count: int, words: Sequence[str]) -> None:
    """Settings that cannot be used change nothing; what runs stays."""
    from outrider.engines.base import EngineError
    from outrider.runtime.access import ConfigurationError
    from outrider.runtime.replicas import ReplicasError

    say = console.messages().print
    try:
        settings = settings_of(parsed(words[words.index("cloud") + 1 :]))
        settings.logins()
        say("replacing the replicas one by one", style="dim")
        with console.progress("replacing the replicas one by one") as tell:
            replicas.update(_shared(settings, count), tell)
    except (CommandError, ConfigurationError, EngineError, OSError, ReplicasError) as error:
        say(f"not replaced, what ran goes on: {error}", markup=False)
    else:
        say("replaced", style="dim")
