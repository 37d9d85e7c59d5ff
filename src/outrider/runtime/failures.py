"""How an answer through a verifier fails. Apart from what makes answers, so that a command line can
name it without loading all of that."""

from __future__ import annotations

from outrider.proto.messages import Code


class CloudError(Exception):
    """The cloud could not serve the request; `code` is the protocol's error code."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"{message} ({code.value})")
        self.code = code
