"""Options of compilers that several chips share, each with the reason for it.

Seen in programs of jax 0.10.0, 0.10.2 and 0.12.0.1. Other options are refused or change nothing:
the offload to SparseCores on v4 and v5e, the "async collective fusion" on v5e (no change), v5p and
v6e (refused).
"""

from jaxpar.platforms.chips import Compiler, Option

# By their names in HLO.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "ragged-all-to-all")

_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
SPARSE_CORES = tuple(
    Option(
        _OFFLOAD + name.replace("-", "_"),
        "true",
        f"without it the matrix units wait for each {name}; with it a SparseCore sends meanwhile",
        frees=name,
    )
    for name in COLLECTIVES
)
PERMUTES = Option(
    "xla_max_concurrent_async_collective_permutes",
    "16",
    "without it at most five permutes are under way, and three rings that share no link have six",
)
# Steps of plain jit with FSDP take up to a third less with it. A step with tp alone takes 4% more
# (v5e). Code in shard_map is the same with and without it.
WHOLE_MATMULS = Option(
    "xla_jf_spmd_threshold_for_windowed_einsum_mib",
    "1000000",
    "without it the partitioner cuts each large matmul of plain jit whose operand it gathers into "
    "a piece for each device, a windowed einsum, in place of a gather and one matmul",
)
_EARLY_STARTS = Option(
    "xla_gpu_enable_latency_hiding_scheduler",
    True,
    "without it a collective starts where the program has it, not as early as its operands are "
    "there",
)
OF_GPUS = Compiler((_EARLY_STARTS,), frozenset(COLLECTIVES))

# What commands describe without --target, where this compiler is installed.
DESCRIBED = {"tpu": "v5e:2x4", "gpu": "h100:8"}
