"""What this machine offers and what is missing: the facts behind `outrider doctor`.

Looks only; installs, downloads and changes nothing. torch is imported inside a function, and
only when it is installed.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from outrider.engines import builtin

PACKAGES: Final = {
    "base": ("numpy", "typer", "rich"),
    "torch": ("torch", "transformers", "tokenizers", "safetensors", "gguf", "accelerate", "jinja2"),
    "llamacpp": ("llama-cpp-python", "jinja2"),
}
"""Extra (base: none needed) to the distributions it brings, as in pyproject.toml."""
ENGINES: Final = ("torch", "llamacpp")
"""Extras that bring an engine for real models: one of them is enough."""
CPU_FLAGS: Final = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")
"""The processor features that decide how fast bfloat16 and int8 run."""
INSTALL_TORCH: Final = 'pip install "outrider[torch]"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that keeps `outrider generate` from running, and the command that mends it."""

    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The built-in target's weights on this machine."""

    file: str | None
    """The file as published; None: not here."""
    unpacked: dict[str, float]
    """Copies in the cache that models load from: file name to megabytes. Made at first use."""
    drafts: dict[str, float]
    """Drafts that ship inside the package: file name to megabytes."""
    cache: str
    """Folder of everything Outrider keeps outside its package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    version: str
    python: str
    system: str
    cores: int
    memory_gib: float | None
    cpu_features: tuple[str, ...]
    packages: dict[str, str | None]
    """Distribution to version; None: not installed."""
    torch: dict[str, Any] | None
    """Build, threads, devices; None: torch is not installed or does not load."""
    weights: Weights
    problems: tuple[Problem, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.problems


def examine() -> Report:
    """Look at everything once."""
    packages = {name: _version(name) for names in PACKAGES.values() for name in names}
    problems = [*_package_problems(packages)]
    torch_facts = None
    if packages["torch"] is not None:
        torch_facts, problem = _torch_facts()
        problems += [problem] if problem else []
    weights = _weights()
    if weights.file is None:
        problems.append(Problem(what=f"the weights of {builtin.SPEC}", fix="outrider pull"))
    return Report(
        version=metadata.version("outrider"),
        python=f"{platform.python_version()} ({sys.executable})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=_cores(),
        memory_gib=_memory_gib(),
        cpu_features=_cpu_features(),
        packages=packages,
        torch=torch_facts,
        weights=weights,
        problems=tuple(problems),
    )


def machine() -> dict[str, Any]:
    """What a figure was measured on, in short: part of every report that others may read."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": _cores(),
        "memory_gib": _memory_gib(),
        "cpu_features": list(_cpu_features()),
        "python": platform.python_version(),
        "outrider": metadata.version("outrider"),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _package_problems(packages: dict[str, str | None]) -> list[Problem]:
    missing = {
        extra: [name for name in names if packages[name] is None]
        for extra, names in PACKAGES.items()
    }
    problems = []
    if missing["base"]:
        what = f"not installed: {', '.join(missing['base'])}"
        problems.append(Problem(what=what, fix="pip install outrider"))
    if all(missing[extra] for extra in ENGINES):
        what = f"not installed: {', '.join(missing['torch'])} (or, without torch: llama-cpp-python)"
        problems.append(Problem(what=what, fix=INSTALL_TORCH))
    return problems


def _cores() -> int:
    """Cores this process may use (a container often has fewer than the machine)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
    return round(pages * size / 2**30, 1)


def _cpu_features() -> tuple[str, ...]:
    """Of CPU_FLAGS, those the kernel reports; empty where it reports none (macOS, Windows)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    found = set(lines[0].partition(":")[2].split()) if lines else set()
    return tuple(flag for flag in CPU_FLAGS if flag in found)


def shipped_drafts() -> dict[str, float]:
    """Drafts of the built-in target inside this package: file name to megabytes."""
    return _sizes(Path(__file__).parent / "data" / "drafts", "*.safetensors")


def _weights() -> Weights:
    file = builtin.find_gguf()
    return Weights(
        file=str(file) if file else None,
        unpacked=_sizes(builtin.model_folder(), "*.safetensors"),
        drafts=shipped_drafts(),
        cache=str(builtin.cache_folder()),
    )


def _sizes(folder: Path, pattern: str) -> dict[str, float]:
    return {p.name: round(p.stat().st_size / 1e6, 1) for p in sorted(folder.glob(pattern))}


def _torch_facts() -> tuple[dict[str, Any] | None, Problem | None]:
    try:
        import torch
    except (ImportError, OSError) as error:
        what = f"torch is installed but does not load ({error})"
        return None, Problem(what=what, fix="pip install --force-reinstall torch")
    devices = ["cpu"]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        devices += [f"cuda:{i} ({name})" for i, name in enumerate(names)]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "devices": devices,
    }, None
