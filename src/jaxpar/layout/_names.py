"""Names of weights in published models, and their kinds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from jaxpar.layout._paths import parts_of

# By kind, in lower case. A suffix `_weight`, `_bias` or `_kernel` may follow a name.
NAMES = {
    "whole": (
        r".*norm.*|.*layrnorm|ln.*|.*position.*|wpe|pos|pos_.*|.*_pos|posemb.*"
        r"|.*router.*|shared_expert_gate|(q|kv)_a_proj(_with_mqa)?|w(q|kv)_a"
        r"|conv(\d?d)?_?\d*|patch_embed.*|.*token_type.*|segment_embed.*|type_embed.*|time_embed.*"
        r"|(cls|mask|class|register|distillation)_(token|embed).*|cls|rotary.*|transform"
        r"|project_(in|out)|(text|visual)_projection|eh_proj|logit_scale"
    ),
    "gate": r"gate",
    "attention": (
        r"(query|key|value)(_proj)?|[qkv]|w_?[qkv]|[qkv]_proj|[qkv]_lin|to_[qkv]|q_attn"
        r"|(q|kv)_b_proj|w(q|kv)_b|sinks"
    ),
    "heads": r"(q|kv|qkv|attn_vec)_einsum",  # [..., heads, d, size] or [heads, size, d]
    "mlp": (
        r"(w_)?up|w_in|w_gate|gate_proj|up_proj|w1|w3|wi|wi_[01]|fc1|c_fc|fc_in|dense_h_to_4h|linear1|lin1"
        r"|intermediate|gating_einsum|feedforward_(gate|intermediate)_dense|ffw_gating(_2)?"
    ),
    "fused": (
        r"w?qkv|qkv_proj|c_attn|in_proj|w_pack|query_key_value|linear_qkv|gate_up(_proj)?|w12"
        r"|fused_.*"
    ),
    "after": r"dense|proj|linear",  # rows, if the same parent has columns
    "out": (
        r"out|output|o|w_?o|o_proj|out_proj|output_proj|to_out|out_lin|c_proj|attention_output"
    ),
    "down": (
        r"(w_)?down|w_out|down_proj|w2|fc2|dense_4h_to_h|linear2|lin2|fc_out"
        r"|feedforward_output_dense|ffw_linear"
    ),
    "logits": (
        r"logits.*|lm_head|unembed(ding)?|embed_out|predictions|vocab_projector|reverse_embeddings"
    ),
    "perhaps logits": r"head|proj_out|output_projection",
    "table": (
        r"embed|embedding|embeddings|embed_tokens|token_embed(ding|der)?s?|tok_embeddings|wte"
        r"|word_embed(ding)?s?|embed_in|input_embedding|shared"
    ),
    "bias by heads, last": r"relative_attention_bias",
    "bias by heads": r"relpos_bias",
}
INSIDE_WHOLE = r"classifier|classification_head|pooler|seq_relationship|score"
LEAF = r"(q?weight|kernel|scale).*|qzeros|embeddings?|.*bias|w|b|table|default|base_layer|value|\d+"
KEYS = r"(key|value)(_proj)?|(w|to_)?[kv](_(proj|lin))?"
ADAPTER = re.compile(r"(?:/|_|^)lora[_/]?(?:embedding_)?([ab]|down|up)(?=[_/]|$)")
OF_HEADS = r"_?(q|k|query|key)_?(layer)?_?norm|norm_[qk]"  # norms of each head, or of all heads
PAIR = "gating_einsum"  # gate and up, [2, in, out] or [2, out, in]
EXPERTS = r"experts?"
TABLES = {"whole", "table", "bias by heads", "bias by heads, last"}
BESIDE = {"attention", "heads", "mlp", "fused"}  # rows multiply their results


@dataclass(frozen=True)
class Named:
    """The information in an array's path.

    Attributes:
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


class Names:
    """All paths' names. Some kinds depend on neighbours."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._beside: dict[tuple[str, ...], set[str]] = defaultdict(set)
        paths = list(paths)
        for path in paths:
            parts = _lower(path)
            for place, part in enumerate(parts):
                self._beside[parts[:place]].add(part)
        self.of = {path: self._named(path) for path in paths}

    def follows_columns(self, parent: tuple[str, ...]) -> bool:
        return any(_kind(name) in BESIDE for name in self._beside[parent])

    def _named(self, path: str) -> Named:
        parts = _lower(path)
        found = ADAPTER.search("/".join(parts))
        adapter = found and {"down": "a", "up": "b"}.get(found[1], found[1])
        if any(re.fullmatch(INSIDE_WHOLE, part) for part in parts):
            return Named(path, parts, "whole", len(parts) - 1, adapter)
        last = len(parts) - 1
        own = found.string[: found.start()].count("/") if found else last
        places = list(range(own, -1, -1))
        # Flax and Keras give any table this name. Names around it decide.
        if parts[-1] in ("embedding", "embeddings"):
            outer = [place for place in places[1:] if _kind(parts[place]) in TABLES]
            places = [*outer, last]
        for place in places:
            kind = _kind(parts[place])
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


@cache  # layers share names
def _kind(name: str) -> str | None:
    for text in (name, re.sub(r"_(bias|weight|kernel)$", "", name)):
        for kind, pattern in NAMES.items():
            if re.fullmatch(pattern, text):
                return kind
    return None
