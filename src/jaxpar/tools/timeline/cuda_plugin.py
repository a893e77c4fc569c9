"""Finds JAX's CUDA plugin and the GPUs that it describes."""

import importlib.util
import mmap
import re
from pathlib import Path
from typing import Any

from jaxpar.tools.toolkit_api import Gpu, platforms

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def find_plugin() -> str | None:
    return next((name for name in PLUGINS if _find_spec(name) is not None), None)


def described_gpus(plugin: str) -> dict[str, str]:
    """Returns GpuTargetConfigProto texts by GPU name (see `slug`).

    The plugin of jax 0.10 has none, so those of `platforms` are used. Little depends on them:
    without a device no tiles are tuned.
    """
    folder = Path(next(iter(_find_spec(plugin).submodule_search_locations)))
    with (folder / "xla_cuda_plugin.so").open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    texts: dict[str, str] = {}
    with data:
        for match in re.finditer(rb'device_description_str: "([^"]+)"', data):
            start = data.rfind(b"\0", 0, match.start()) + 1
            text = data[start : data.find(b"\0", match.end())].decode("ascii", "ignore")
            if "cuda_compute_capability" in text:
                texts[match.group(1).decode()] = text
    known = [gpu.description for gpu in platforms() if isinstance(gpu, Gpu) and gpu.description]
    texts = texts or {gpu[0]: _text(*gpu) for gpu in known}
    return {slug(name): text for name, text in texts.items()}


def slug(description: str) -> str:
    """Returns a GPU's name without vendor, hyphenated."""
    words = re.findall(r"[a-z0-9.]+", description.lower())
    return "-".join(word for word in words if word not in ("nvidia", "tesla"))


def _find_spec(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None


def _text(
    name: str, capability: tuple[int, int], cores: int, cache: int, clock: float, *memory: int
) -> str:
    major, minor = capability
    size, speed = memory
    # A multiprocessor's shared memory, in KiB.
    shared = (164 if major == 8 else 228) << 10
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 << 10}
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared - 1024}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {64 if major == 8 else 128}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  memory_bandwidth: {speed}
  device_memory_size: {size}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""
