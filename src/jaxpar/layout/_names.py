"""Names of weights in published models, and their kinds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from jaxpar.layout._paths import parts_of
from jaxpar.layout._weight_formats import PartName, parts_in

# By kind, in lower case. A suffix `_weight`, `_bias` or `_kernel` may follow a name.
NAMES = {
    "whole": (
        r".*norm.*|.*layrnorm|ln.*|(?!.*(ff|feed|proj)).*position.*|wpe|pos|(?!.*(ff|proj))pos_.*|.*_pos|posemb.*"
        r"|.*router.*|shared_expert_gate|(q|kv)_a_proj(_with_mqa)?|w(q|kv)_a"
        r"|conv(\d?d)?_?\d*|patch_embed.*|.*token_type.*|segment_embed.*|type_embed.*|time_embed.*"
        r"|(cls|mask|class|register|distillation)_(token|embed).*|cls|rotary.*|transform"
        r"|ffn_gate_inp.*|project_(in|out)|(text|visual)_projection|eh_proj|logit_scale"
    ),
    "gate": r"gate",
    "attention": (
        r"(query|key|value)(_proj)?|[qkv]|w_?[qkv]|[qkv]_proj|[qkv]_lin|to_[qkv]|q_attn|attn_[qkv]"
        r"|(q|kv)_b_proj|w(q|kv)_b|sinks|receptance"
    ),
    "heads": r"(q|kv|qkv|attn_vec)_einsum",  # [..., heads, d, size] or [heads, size, d]
    "mlp": (
        r"(w_)?up|w_in|w_gate|gate_proj|up_proj|w1|w3|wi|wi_[01]|fc1|c_fc|fc_in|dense_h_to_4h|linear1|lin1"
        r"|linear_fc1|intermediate|gating_einsum|feedforward_(gate|intermediate)_dense|ffw_gating(_2)?|ffn_(gate|up)"
    ),
    "fused": (
        r"(to_|w_?|linear_|attn_)?(qkv|kv|qk)(_proj|_lin)?|c_attn|in_proj(_\w+)?|w_pack|w12|w13"
        r"|query_key_value|key_value|gate_?(and_)?up(_proj)?|up_gate(_proj)?|fused_.*"
    ),
    "after": r"dense|proj|linear",  # rows, if the same parent has columns
    "out": (
        r"out|output|o|w_?o|o_proj|out_proj|output_proj|to_out|out_lin|c_proj|attention_output"
        r"|attn_output|linear_proj"
    ),
    "down": (
        r"(w_)?down|w_out|down_proj|w2|fc2|dense_4h_to_h|linear2|lin2|fc_out"
        r"|feedforward_output_dense|ffw_linear|ffn_down|linear_fc2"
    ),
    "logits": (
        r"logits.*|lm_head|unembed(ding)?|embed_out|predictions|vocab_projector|reverse_embeddings"
    ),
    "perhaps logits": r"head|proj_out|output_projection",
    "table": (
        r"embed|embedding|embeddings|embed_tokens|token_embed(ding|der)?s?|tok_embeddings|wte"
        r"|word_embed(ding)?s?|embed_in|input_embedding|shared|token_embd"
    ),
    "bias by heads, last": r"relative_attention_bias",
    "bias by heads": r"relpos_bias",
    "channels": r"time_(decay|first|faaaa)",  # of RWKV: [d], [1, 1, d] or [heads, size]
}
# DeepSeek's compressors and indexers work on all heads at once.
INSIDE_WHOLE = r"classifier|classification_head|pooler|seq_relationship|score|compressor|indexer"
LEAF = (
    r"(q?weight|kernel|scale).*|qzeros|embeddings?|.*bias|w|b|table|default|base_layer|value|array"
    r"|\d+"
)
KEYS = r"(key|value)(_proj)?|(w|to_)?[kv](_(proj|lin))?"
ADAPTER = re.compile(r"(?:/|_|^)lora[_/]?(?:embedding_)?([ab]|down|up)(?=[_/]|$)")
OF_HEADS = r"_?(q|k|query|key)_?(layer)?_?norm|norm_[qk]"  # norms of each head, or of all heads
PAIR = "gating_einsum"  # gate and up, [2, in, out] or [2, out, in]
NORM = re.compile(r"norm[a-z]*\d*_?|^ln\d*_?")
EXPERTS = r"experts?"
ANY_TABLE = r"embed|embeddings?"  # Flax and Keras give any table this name
WORDS = r"tok|word|vocab|input|text|^embedd(er|ings?)$"
TABLES = {"whole", "table", "bias by heads", "bias by heads, last"}
BESIDE = {"attention", "heads", "mlp", "fused"}  # rows multiply their results


@dataclass(frozen=True)
class Named:
    """The information in an array's path.

    Attributes:
      parts: the path's parts; those of the weight, where several arrays hold it.
      kind: of `NAMES`, or None.
      place: the index of the name with the kind.
      adapter: `a` or `b` of a low-rank adapter.
    """

    path: str
    parts: tuple[str, ...]
    kind: str | None
    place: int
    adapter: str | None

    @property
    def name(self) -> str:
        return self.parts[self.place]

    @property
    def module(self) -> tuple[str, ...]:
        return self.parts[: self.place + 1]

    @property
    def parent(self) -> tuple[str, ...]:
        return self.parts[: self.place]

    @property
    def inside(self) -> tuple[str, ...]:
        """Returns the path after the module, alike in layers."""
        return self.parts[self.place + 1 :]

    @property
    def leaf(self) -> str:
        """Returns `weight`, `kernel` or the like, which fixes dimensions' order."""
        if self.name == PAIR:
            return PAIR
        last = self.inside[-1] if self.inside else ""
        last = "weight" if last.startswith("weight") else last
        return last if re.fullmatch(LEAF, last) else ""

    @property
    def direct(self) -> bool:
        return all(re.fullmatch(LEAF, part) for part in self.inside)

    @property
    def bias(self) -> bool:
        return self.parts[-1] == "b" or self.parts[-1].endswith("bias")

    @property
    def is_key(self) -> bool:
        return re.fullmatch(KEYS, self.name) is not None

    @property
    def of_experts(self) -> bool:
        return any(re.fullmatch(EXPERTS, part) for part in self.parts)

    @property
    def of_all_experts(self) -> bool:
        """Returns whether no number follows `experts`."""
        after = self.parts[self.parts.index("experts") + 1 :] if "experts" in self.parts else None
        return after is not None and not any(re.fullmatch(r"\D*_?\d+", part) for part in after[:-1])

    def of_matrix(self) -> Named:
        """Returns it for a matrix, which is no norm: a norm and a projection in one module."""
        if self.kind != "whole" or not NORM.search(self.name) or re.fullmatch(OF_HEADS, self.name):
            return self
        return replace(self, kind="fused" if _is_fused(self.name) else None)


class Names:
    """All paths' names. Some kinds depend on neighbours."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._beside: dict[tuple[str, ...], set[str]] = defaultdict(set)
        paths = tuple(paths)
        self.parts: dict[str, PartName] = parts_in(paths)
        parts_of_path = {
            path: self.parts[path].weight if path in self.parts else _lower(path) for path in paths
        }
        for parts in parts_of_path.values():
            for place, part in enumerate(parts):
                self._beside[parts[:place]].add(part)
        self.of = {path: self._named(path, parts) for path, parts in parts_of_path.items()}

    def follows_columns(self, parent: tuple[str, ...]) -> bool:
        return any(_kind(n) in BESIDE or _is_fused(n) for n in self._beside[parent])

    def _named(self, path: str, parts: tuple[str, ...]) -> Named:
        match = ADAPTER.search("/".join(parts))
        adapter = match and {"down": "a", "up": "b"}.get(match[1], match[1])
        if any(re.fullmatch(INSIDE_WHOLE, part) for part in parts):
            return Named(path, parts, "whole", len(parts) - 1, adapter)
        last = len(parts) - 1
        start = match.string[: match.start()].count("/") if match else last
        places = list(range(start, -1, -1))
        # Names around a table decide.
        if parts[-1] in ("embedding", "embeddings"):
            outer = [place for place in places[1:] if _kind(parts[place]) in TABLES]
            places = [*outer, last]
        for place in places:
            kind = _kind(parts[place])
            if kind == "table" and place and re.fullmatch(ANY_TABLE, parts[place]):
                kind = _kind_of_table(parts[place - 1])
            if kind == "after":
                kind = "out" if self.follows_columns(parts[:place]) else None
            elif parts[place] == "w3" and "w12" in self._beside[parts[:place]]:
                kind = "down"
            if kind is not None:
                return Named(path, parts, kind, place, adapter)
        inner = next((place for place in places if not re.fullmatch(LEAF, parts[place])), last)
        return Named(path, parts, None, inner, adapter)


def _lower(path: str) -> tuple[str, ...]:
    return tuple(part.lower() for part in parts_of(path))


def _kind_of_table(parent: str) -> str | None:
    """Returns the kind of a table with a layer of its own, which names it: positions, say."""
    kind = _kind(parent)
    if kind in TABLES:
        return kind
    return None if re.search("embed|_emb", parent) and not re.search(WORDS, parent) else "table"


def _is_fused(name: str) -> bool:
    """Returns whether a norm and several projections share a module."""
    norm = NORM.search(name)
    return norm is not None and _kind(name[norm.end() :]) == "fused"


@cache  # layers share names
def _kind(name: str) -> str | None:
    for text in (name, re.sub(r"_(bias|weight|kernel)$", "", name)):
        for kind, pattern in NAMES.items():
            if re.fullmatch(pattern, text):
                return kind
    return None
