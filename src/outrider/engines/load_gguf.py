"""Targets in GGUF files, on llama.cpp: which spec names one, the model, or its vocabulary alone."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from outrider.engines import builtin
from outrider.engines.base import EngineError, ModelNotFoundError
from outrider.engines.loaded import GGUF_MODULES, Loaded, Wish, absent, require

_GGUF: Final = "gguf:"
_MAGIC: Final = b"GGUF"


def is_gguf(spec: str) -> bool:
    """Whether a spec names a GGUF file, there or not."""
    return spec.startswith(_GGUF) or spec.endswith(".gguf")


def gguf_path(spec: str) -> Path | None:
    """The file that a spec for llama.cpp names; None: it is for another engine."""
    if spec == builtin.GGUF_SPEC:
        return builtin.gguf_path()
    if is_gguf(spec):
        return Path(spec.removeprefix(_GGUF)).expanduser()
    return None


def _looked_at(spec: str) -> Path:
    """The file, which is one. Before llama.cpp is asked for, because to install that for a path
    that is wrong takes minutes, and because its own words on a wrong file are about file magic."""
    path = gguf_path(spec)
    assert path is not None
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except FileNotFoundError:
        raise ModelNotFoundError(f"no file {path}") from None
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path}: {error.strerror}") from None
    if start != _MAGIC:
        raise ModelNotFoundError(f"{path} is not a GGUF file")
    return path


def load_gguf(spec: str, wish: Wish) -> Loaded:
    """The model with the tokenizer in its file; EngineError for wishes that llama.cpp cannot
    fulfil, ModelNotFoundError for a file that is not there."""
    path = _looked_at(spec)
    require(*GGUF_MODULES, extra="llamacpp")
    from outrider.engines.gguf_tokenizer import GGUFTokenizer
    from outrider.engines.llama_native import NativeModel
    from outrider.engines.llamacpp import LlamaCppModel

    if wish.dtype != "auto":
        raise EngineError(
            f"{spec} computes in the format its weights are stored in; leave --dtype at auto"
        )
    gpu = _on_gpu(wish)
    native = NativeModel(path, gpu=gpu)
    tokenizer = GGUFTokenizer(native)
    model = LlamaCppModel(
        native,
        name=spec,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        deterministic=wish.deterministic,
        threads=wish.threads,
        device="gpu" if gpu else "cpu",
        max_slots=wish.max_slots,
        context_length=wish.context_length,
    )
    return Loaded(model=model, tokenizer=tokenizer)


def _on_gpu(wish: Wish) -> bool:
    from outrider.engines.llama_native import has_gpu

    here = has_gpu()
    if wish.device not in ("auto", "cpu") and not here:
        raise EngineError(
            f"device {wish.device!r} asked for, but this build of llama-cpp-python runs on the CPU"
        )
    return here and wish.device != "cpu"


def gguf_vocabulary(spec: str) -> Loaded:
    """Tokenizer and facts of a GGUF file, without its weights. Raises as `load_gguf`."""
    path = _looked_at(spec)
    require(*GGUF_MODULES, extra="llamacpp")
    from outrider.engines.gguf_tokenizer import GGUFTokenizer
    from outrider.engines.llama_native import NativeModel
    from outrider.engines.llamacpp import usable_context as gguf_context

    native = NativeModel(path, vocabulary_only=True)
    context = gguf_context(native, None)
    return absent(spec, GGUFTokenizer(native), width=native.width, context=context)
