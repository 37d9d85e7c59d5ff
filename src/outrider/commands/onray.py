"""The verifier for a Ray that runs already: `serve run outrider.commands.onray:application`, or a
RayService of KubeRay (deploy/kubernetes/rayservice.yaml). Needs the extra `ray`.

`outrider cloud --replicas N` starts a Ray of its own instead and needs none of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outrider.commands.asgi import hosted
from outrider.commands.cloud import settings_of
from outrider.commands.errors import CommandError

KNOWN: Final = frozenset({"options", "replicas"})


def application(args: Mapping[str, Any]) -> Any:
    """A Ray Serve application. `options`: words of `outrider cloud` that are not Ray's, such as
    "--model builtin:smollm2 --token-file tokens"; `replicas`: how many verifiers. Raises
    CommandError."""
    options, replicas = read(args)
    from outrider.runtime.replicas import deployment

    return deployment(settings_of(options), replicas)


def read(args: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Options as parsed, and how many replicas. Raises CommandError."""
    unknown = sorted(args.keys() - KNOWN)
    if unknown:
        raise CommandError(f"{unknown[0]}: no such argument; there are options and replicas")
    try:
        replicas = int(args.get("replicas", 1))
    except ValueError as error:
        raise CommandError(f"replicas: {error}") from None
    if replicas < 1:
        raise CommandError(f"replicas: 1 or more, not {replicas}")
    return hosted(str(args.get("options", "")), where="options", host="Ray"), replicas
