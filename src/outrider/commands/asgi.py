"""`uvicorn --factory outrider.commands.asgi:app_from_env`: the verifier under an ASGI server.

The environment variable OUTRIDER_CLOUD holds options of `outrider cloud` as its command line has
them, such as `--model builtin:smollm2 --token-file tokens` or `--config outrider.toml`. Address and
certificates are the host's, which is also the one to see that strangers cannot read along.
"""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any, Final

from outrider.commands.cloud import parsed, settings_of
from outrider.commands.errors import CommandError

if TYPE_CHECKING:
    from outrider.runtime.asgi import CloudApp

VARIABLE: Final = "OUTRIDER_CLOUD"
HOSTS: Final = ("listen", "tls_cert", "tls_key", "replicas")
"""Options that the host decides about."""


def app_from_env() -> CloudApp:
    """Load what OUTRIDER_CLOUD says. Raises CommandError, ConfigurationError, EngineError,
    OSError."""
    from outrider.runtime.serving import application

    text = os.environ.get(VARIABLE, "")
    return application(settings_of(hosted(text, where=VARIABLE, host="the ASGI server")))


def hosted(text: str, *, where: str, host: str) -> dict[str, Any]:
    """Options of `outrider cloud`, less those that its host decides about. `where`, `host`: for
    messages. Raises CommandError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CommandError(f"{where}: {error}") from None
    options, plain = parsed(words), parsed([])
    for name in HOSTS:
        if options[name] != plain[name]:
            shown = name.replace("_", "-")
            raise CommandError(f"{where}: --{shown} is {host}'s: give it there")
    return options
