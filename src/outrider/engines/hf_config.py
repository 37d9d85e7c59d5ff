"""What a transformers config says, read without torch: an edge knows a target by it alone."""

from __future__ import annotations

from typing import Any, Final

from outrider.engines.base import EngineError

_SWITCHING_ROPE: Final = ("dynamic", "longrope")


def number(config: Any, name: str) -> int:
    """An integer setting; 0 where the config has none."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def usable_context(config: Any, wanted: int | None) -> int:
    """Context length in tokens: the model's own, or less where `wanted` says so.

    Rope variants that change all frequencies once a sequence is long (dynamic NTK, LongRoPE)
    would make old cache entries wrong and one session's bits depend on another's length, so
    they are used up to the length where they switch, and no further.
    """
    config = config.get_text_config(decoder=True)
    limits = [number(config, "max_position_embeddings")]
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type") in _SWITCHING_ROPE:
        limits.append(int(rope.get("original_max_position_embeddings") or limits[0]))
    if wanted is not None:
        limits.append(wanted)
    known = [limit for limit in limits if limit > 0]
    if not known:
        raise EngineError("the model states no context length; give one (context_length=...)")
    return min(known)
