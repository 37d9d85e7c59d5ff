"""From a spec string to a model that runs. Only this file and `load_gguf` name the backends.

| spec | what it is |
| --- | --- |
| `builtin:smollm2` | the built-in target (engines/builtin.py) |
| `builtin:smollm2-gguf` | the same weights as they are stored (q4_1), on llama.cpp |
| `gguf:PATH`, or a path that ends in `.gguf` | a GGUF file, on llama.cpp |
| `openai:URL#MODEL`, `vllm:...`, `sglang:...` | a server that runs MODEL (targets only) |
| `toy`, `toy:SEED`, `toy:SEED:SHARE` | a random law over bytes; SHARE of contexts follow another |
| a folder | a transformers checkpoint with its tokenizer |
| `owner/name` | the same on the Hugging Face hub |
| `small`, `large` (drafts only) | our distilled drafts of the built-in target |
| a `.safetensors` file (drafts only) | a draft made by `outrider distill` |
| `replay:FILE` (drafts only) | a draft's guesses, recorded by `outrider record` |

Backends are imported inside the functions: an edge that uses none of them needs none of them.
"""

from __future__ import annotations

import logging as standard_logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from outrider.core import rng
from outrider.engines import remote, replay
from outrider.engines.base import (
    EngineError,
    LanguageModel,
    ModelNotFoundError,
    UnsupportedModelError,
)
from outrider.engines.drafters import Drafter, ModelDrafter
from outrider.engines.hf_config import number, usable_context
from outrider.engines.load_gguf import gguf_path, gguf_vocabulary, is_gguf, load_gguf
from outrider.engines.loaded import GGUF_MODULES, Loaded, Wish, absent, installed, require
from outrider.engines.remote_http import Endpoint
from outrider.engines.selfcheck import require_bits
from outrider.engines.tokenizer import (
    ByteTokenizer,
    HFTokenizer,
    Tokenizer,
    check_same_vocabulary,
)

log = standard_logging.getLogger("outrider.load")

DTYPES: Final = ("auto", "bfloat16", "float16", "float32")
DISTILLED: Final = ("small", "large")
LOOKUP: Final = "lookup"
DEFAULT_TARGET_SLOTS: Final = 16
DEFAULT_DRAFT_SLOTS: Final = 64
"""Requests that share a draft engine: it drafts for 8 at once, and many wait for the cloud. A slot
takes memory as it is filled; requests beyond are answered without a draft."""
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")
_TORCH_MODULES: Final = ("torch", "transformers", "tokenizers", "safetensors")


def load_target(
    spec: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    deterministic: bool = True,
    threads: int | None = None,
    max_slots: int = DEFAULT_TARGET_SLOTS,
    rows: int | None = None,
    context_length: int | None = None,
) -> Loaded:
    """Load a target. `dtype` 'auto': bfloat16 for the built-in, else the checkpoint's own.
    `device` 'auto': CUDA where there is one. `threads`: of torch on the CPU, for the whole
    process; of llama.cpp, for this model. `rows`: of a deterministic pass (llama.cpp needs no
    fixed number). `context_length`: less than the model's own.

    A deterministic target is tried before it is returned: EngineError where it is none here."""
    wish = Wish(
        dtype=dtype,
        device=device,
        deterministic=deterministic,
        threads=threads,
        max_slots=max_slots,
        rows=rows,
        context_length=context_length,
    )
    _check_names(wish)
    if _is_toy(spec):
        return _load_toy(spec, max_slots=max_slots)
    wanted = remote.parse(spec)
    if wanted is not None:
        return _load_remote(wanted, wish)
    if gguf_path(spec) is not None:
        loaded = load_gguf(spec, wish)
    elif spec.startswith("builtin:"):
        loaded = _load_builtin(spec, wish)
    else:
        loaded = _load_pretrained(spec, wish)
    require_bits(loaded.model)
    return loaded


def load_vocabulary(spec: str) -> Loaded:
    """What an edge needs of a target that runs elsewhere: its tokenizer and its facts, without
    weights. The model of the result knows its `info` and refuses to run.

    End ids and context are those of `load_target`: the edge finds the end of an answer by
    itself, and where the cloud found another the answer would be refused as a contradiction."""
    if _is_toy(spec):
        return _load_toy(spec, max_slots=1)
    wanted = remote.parse(spec)
    if wanted is not None:
        return load_vocabulary(wanted.model)
    if gguf_path(spec) is not None:
        return gguf_vocabulary(spec)
    if spec.startswith("builtin:"):
        from outrider.engines import builtin

        _require_builtin(spec)
        if not installed("transformers") and installed(*GGUF_MODULES):
            # An edge without torch: the same vocabulary out of the same file.
            return gguf_vocabulary(builtin.GGUF_SPEC)
        require("tokenizers", "transformers", "gguf")
        builtin.gguf_path()
        return _hf_absent(spec, builtin.load_config(), builtin.load_tokenizer())
    require("tokenizers", "transformers")
    source = _source(spec)
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    with _loading(spec):
        config = AutoConfig.from_pretrained(source)
        words = AutoTokenizer.from_pretrained(source)
        try:
            answering = GenerationConfig.from_pretrained(source)
        except OSError:  # none beside the weights: transformers derives it from the config
            answering = GenerationConfig.from_model_config(config)
    tokenizer = HFTokenizer(words, eos_token_ids=_end_ids(answering, words))
    return _hf_absent(spec, config, tokenizer)


def _end_ids(generation_config: Any, words: Any) -> set[int]:
    """Ids that end a text: the checkpoint's and the tokenizer's."""
    ends = getattr(generation_config, "eos_token_id", None)
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    own = [] if words.eos_token_id is None else [int(words.eos_token_id)]
    return {*listed, *own}


def _hf_absent(spec: str, config: Any, tokenizer: Tokenizer) -> Loaded:
    width = number(config.get_text_config(decoder=True), "vocab_size")
    return absent(spec, tokenizer, width=width, context=usable_context(config, None))


def load_draft_model(
    spec: str,
    target: Loaded,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    max_slots: int = DEFAULT_DRAFT_SLOTS,
) -> LanguageModel:
    """Load a draft for `target`; IncompatibleModelsError if their vocabularies differ.

    Drafts are not run deterministically: their bits change how often a guess is right, never
    the text (docs/architecture.md, Acceptance)."""
    if spec in DISTILLED or spec.endswith(".safetensors"):
        require(*_TORCH_MODULES, "gguf")
        _set_threads(threads)
        return _load_distilled(spec, target, dtype=dtype, device=device, max_slots=max_slots)
    draft = load_target(
        spec,
        dtype=dtype,
        device=device,
        deterministic=False,
        threads=threads,
        max_slots=max_slots,
    )
    check_same_vocabulary(target.tokenizer, draft.tokenizer)
    return draft.model


def load_drafter(spec: str, target: Loaded, **options: Any) -> Drafter | None:
    """Who drafts: `none`, `lookup`, a model (`load_draft_model`), `lookup+MODEL`, which asks the
    model only where the prompt holds nothing to copy, or `replay:FILE`, which needs no model.
    Options: `load_draft_model`'s."""
    if spec == "none":
        return None
    if spec.startswith(replay.PREFIX):
        info = target.model.info
        return replay.load_replay(spec, target=info.name, fingerprint=info.fingerprint)
    if spec == LOOKUP:
        return ModelDrafter(spec, lookup=True)
    name = spec.removeprefix(f"{LOOKUP}+")
    if name.startswith(replay.PREFIX):
        raise EngineError(f"{spec}: a recorded draft stands alone; use --draft {name}")
    model = load_draft_model(name, target, **options)
    return ModelDrafter(spec, model=model, lookup=name != spec)


def _check_names(wish: Wish) -> None:
    if wish.dtype not in DTYPES:
        raise EngineError(f"unknown dtype {wish.dtype!r}; use one of {', '.join(DTYPES)}")
    if not _DEVICE.fullmatch(wish.device):
        raise EngineError(f"unknown device {wish.device!r}; use auto, cpu, cuda or cuda:N")


def _require_builtin(spec: str) -> None:
    from outrider.engines import builtin

    if spec != builtin.SPEC:
        raise ModelNotFoundError(
            f"unknown built-in model {spec!r}; there is {builtin.SPEC} and {builtin.GGUF_SPEC}"
        )


def _set_threads(count: int | None) -> None:
    import torch

    if count is not None:
        if count < 1:
            raise EngineError(f"threads must be at least 1, got {count}")
        torch.set_num_threads(count)


def _device(wish: Wish) -> str:
    import torch

    _set_threads(wish.threads)
    if wish.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wish.device != "cpu" and not torch.cuda.is_available():
        raise EngineError(f"device {wish.device!r} asked for, but torch sees no CUDA device")
    return wish.device


def _is_toy(spec: str) -> bool:
    return spec == "toy" or spec.startswith("toy:")


def _load_toy(spec: str, *, max_slots: int) -> Loaded:
    from outrider.engines.toy import ToyModel, blend_law, random_law

    found = re.fullmatch(r"toy(?::(\d{1,18})(?::(0(?:\.\d+)?|1(?:\.0+)?))?)?", spec)
    if not found:
        raise ModelNotFoundError(f"{spec!r} is not a toy; use toy, toy:SEED or toy:SEED:SHARE")
    seed, share = int(found[1] or 0), float(found[2] or 0.0)
    tokenizer = ByteTokenizer()
    law = random_law(seed, tokenizer.vocab_size)
    if share:
        other = random_law(seed + 1, tokenizer.vocab_size)
        # Another seed than the law's: its likely tokens are those that hash high, and where the
        # share hung on the same hash no context of its own text would ever follow the other law.
        law = blend_law(law, other, share, rng.mix((seed + rng.GOLDEN) & rng.MASK))
    model = ToyModel(
        law,
        vocab_size=tokenizer.vocab_size,
        name=spec,
        eos_token_ids=tokenizer.eos_token_ids,
        fingerprint=tokenizer.fingerprint,
        max_slots=max_slots,
    )
    return Loaded(model=model, tokenizer=tokenizer)


def _load_builtin(spec: str, wish: Wish) -> Loaded:
    from outrider.engines import builtin

    _require_builtin(spec)
    require(*_TORCH_MODULES, "gguf")
    builtin.gguf_path()
    device = _device(wish)
    dtype = "bfloat16" if wish.dtype == "auto" else wish.dtype
    tokenizer = builtin.load_tokenizer()
    return _engine(spec, builtin.load_model(dtype).to(device), tokenizer, wish)


def _load_remote(wanted: remote.RemoteSpec, wish: Wish) -> Loaded:
    """A server's model with the tokenizer that is named for it. Nothing is sent but questions who
    it is and how it cuts a few texts."""
    if wish.dtype != "auto" or wish.device != "auto" or wish.threads is not None:
        raise EngineError(
            f"how {wanted.url} computes is that server's business; leave out --dtype, --device "
            "and --threads"
        )
    server = Endpoint(wanted.url, key=os.environ.get(remote.KEY_VARIABLE, ""))
    identity = remote.Identity(server, wanted)
    vocabulary = load_vocabulary(wanted.model)
    tokenizer = vocabulary.tokenizer
    if not remote.check_tokenizer(server, tokenizer, identity.served):
        log.warning(
            "%s has no /tokenize, so nobody has checked that its vocabulary is that of %s",
            wanted.url,
            wanted.model,
        )
    limits = (identity.context_length, vocabulary.model.info.context_length, wish.context_length)
    model = remote.RemoteModel(
        remote.make_way(wanted.way, server, identity.served),
        name=f"{wanted.way}#{wanted.model}",
        tokenizer=tokenizer,
        context_length=min(limit for limit in limits if limit),
        max_slots=wish.max_slots,
        check=identity.check,
    )
    return Loaded(model=model, tokenizer=tokenizer)


def _load_pretrained(spec: str, wish: Wish) -> Loaded:
    """A checkpoint from a folder or the hub."""
    require(*_TORCH_MODULES)
    source = _source(spec)
    device = _device(wish)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from outrider.engines.hf_support import require_supported

    with _loading(spec):
        config = AutoConfig.from_pretrained(source)
        kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
        if not isinstance(kind, type):
            raise UnsupportedModelError(
                f"{spec}: model type {config.model_type!r} is not a causal language model"
            )
        require_supported(config, kind, deterministic=wish.deterministic)
        words = AutoTokenizer.from_pretrained(source)
        dtype = "auto" if wish.dtype == "auto" else getattr(torch, wish.dtype)
        model = kind.from_pretrained(source, dtype=dtype).to(device)
    ends = _end_ids(model.generation_config, words)
    return _engine(spec, model, HFTokenizer(words, eos_token_ids=ends), wish)


def _engine(spec: str, model: Any, tokenizer: Tokenizer, wish: Wish) -> Loaded:
    from outrider.engines.hf import DEFAULT_ROWS, HFModel

    engine = HFModel(
        model,
        name=spec,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        deterministic=wish.deterministic,
        rows=wish.rows or DEFAULT_ROWS,
        max_slots=wish.max_slots,
        context_length=wish.context_length,
    )
    return Loaded(model=engine, tokenizer=tokenizer)


def _load_distilled(
    spec: str, target: Loaded, *, dtype: str, device: str, max_slots: int
) -> LanguageModel:
    """A draft that ships with the package, or that `outrider distill` has made."""
    from outrider.engines.distilled import load_draft

    weights = _lent_weights(spec, target.model.info.name)
    return load_draft(
        spec, target=target, weights=weights, dtype=dtype, device=device, max_slots=max_slots
    )


def _lent_weights(draft: str, name: str) -> tuple[Any, Any]:
    """State dict (bfloat16) and config of a target, for a draft that borrows layers from it.
    `name`: the target's; one that a server or llama.cpp runs lends as well, where its weights are
    known here. Raises UnsupportedModelError where they are not."""
    from outrider.engines import builtin

    way, hash_sign, model = name.partition("#")
    if hash_sign and way in remote.WAYS:
        name = model
    if name in (builtin.SPEC, builtin.GGUF_SPEC):  # one file, whoever computes with it
        return builtin.load_state("bfloat16"), builtin.load_config()
    try:
        made = load_checkpoint(name, dtype="bfloat16")
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{draft!r} borrows weights of the target it was made for: {error}; --draft lookup "
            "goes with every target"
        ) from error
    return made.state_dict(), made.config


def load_checkpoint(spec: str, *, dtype: str = "auto") -> Any:
    """The transformers model itself, for who needs its weights and no engine. `dtype`: of DTYPES.
    Raises UnsupportedModelError for a spec that names something else, before the hub is asked."""
    ours = _is_toy(spec) or spec.startswith("builtin:") or is_gguf(spec)
    if ours or remote.parse(spec) is not None:
        raise UnsupportedModelError(f"{spec} is no checkpoint that transformers reads")
    require(*_TORCH_MODULES)
    source = _source(spec)
    import torch
    from transformers import AutoModelForCausalLM

    with _loading(spec):
        wanted = dtype if dtype == "auto" else getattr(torch, dtype)
        return AutoModelForCausalLM.from_pretrained(source, dtype=wanted)


def _source(spec: str) -> str:
    """The folder or hub id to hand to transformers."""
    folder = Path(spec).expanduser()
    if spec and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(f"folder {spec} holds no config.json: not a checkpoint")
        return str(folder)
    if not _HUB_ID.fullmatch(spec) or spec.startswith("."):
        raise ModelNotFoundError(
            f"{spec!r} is neither a folder nor a model id; use builtin:smollm2, a folder with a "
            "checkpoint, or an id such as Qwen/Qwen3-0.6B"
        )
    return spec


@contextmanager
def _loading(spec: str) -> Iterator[None]:
    """transformers kept quiet, its complaints made one line."""
    import transformers

    logging: Any = transformers.utils.logging
    hub = standard_logging.getLogger("huggingface_hub")
    level, verbosity = hub.level, logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    hub.setLevel(standard_logging.ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except EngineError:
        raise
    except OSError as error:
        raise ModelNotFoundError(
            f"no model {spec!r} in the local cache or on the hub (unknown id, private model, or "
            "no connection); use builtin:smollm2, or a folder with a checkpoint"
        ) from error
    except (ValueError, ImportError, RuntimeError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(f"transformers cannot load {spec!r}: {reason}") from error
    finally:
        hub.setLevel(level)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
