"""Tensor parallelism on the names and sizes of published models: each weight right, or refused."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxpar.layout import LayoutError, infer_layout, tensor_parallel

# A name, its shape, and the dimension that is sharded: - of none, x of an array that is refused;
# and its dtype, if that tells how numbers are packed.
FAMILIES = {
    "Llama": """
        model.embed_tokens.weight 128256,4096 0
        model.layers.0.self_attn.q_proj.weight 4096,4096 0
        model.layers.0.self_attn.k_proj.weight 1024,4096 0
        model.layers.0.self_attn.v_proj.weight 1024,4096 0
        model.layers.0.self_attn.o_proj.weight 4096,4096 1
        model.layers.0.self_attn.rotary_emb.inv_freq 64 -
        model.layers.0.mlp.gate_proj.weight 14336,4096 0
        model.layers.0.mlp.up_proj.weight 14336,4096 0
        model.layers.0.mlp.down_proj.weight 4096,14336 1
        model.layers.0.input_layernorm.weight 4096 -
        model.layers.0.post_attention_layernorm.weight 4096 -
        model.norm.weight 4096 -
        lm_head.weight 128256,4096 0""",
    "Llama of Flax": """
        model/embed_tokens/embedding 32000,4096 0
        model/layers/0/self_attn/q_proj/kernel 4096,4096 1
        model/layers/0/self_attn/k_proj/kernel 4096,1024 1
        model/layers/0/self_attn/o_proj/kernel 4096,4096 0
        model/layers/0/mlp/gate_proj/kernel 4096,11008 1
        model/layers/0/mlp/up_proj/kernel 4096,11008 1
        model/layers/0/mlp/down_proj/kernel 11008,4096 0
        model/layers/0/input_layernorm/weight 4096 -
        model/norm/weight 4096 -
        lm_head/kernel 4096,32000 1""",
    "Llama as first published": """
        tok_embeddings.weight 32000,4096 0
        layers.0.attention.wq.weight 4096,4096 0
        layers.0.attention.wk.weight 4096,4096 0
        layers.0.attention.wo.weight 4096,4096 1
        layers.0.feed_forward.w1.weight 11008,4096 0
        layers.0.feed_forward.w2.weight 4096,11008 1
        layers.0.feed_forward.w3.weight 11008,4096 0
        layers.0.attention_norm.weight 4096 -
        norm.weight 4096 -
        output.weight 32000,4096 0""",
    "Mistral with weights turned round": """
        model.embed_tokens.weight 32000,4096 0
        model.layers.0.self_attn.q_proj.weight 4096,4096 1
        model.layers.0.self_attn.k_proj.weight 4096,1024 1
        model.layers.0.self_attn.o_proj.weight 4096,4096 0
        model.layers.0.mlp.up_proj.weight 4096,14336 1
        model.layers.0.mlp.down_proj.weight 14336,4096 0
        model.norm.weight 4096 -
        lm_head.weight 32000,4096 0""",
    "Qwen2": """
        model.embed_tokens.weight 152064,3584 0
        model.layers.0.self_attn.q_proj.weight 3584,3584 0
        model.layers.0.self_attn.q_proj.bias 3584 0
        model.layers.0.self_attn.k_proj.weight 512,3584 0
        model.layers.0.self_attn.k_proj.bias 512 0
        model.layers.0.self_attn.o_proj.weight 3584,3584 1
        model.layers.0.mlp.gate_proj.weight 18944,3584 0
        model.layers.0.mlp.down_proj.weight 3584,18944 1
        lm_head.weight 152064,3584 0""",
    "Qwen3-MoE": """
        model.embed_tokens.weight 151936,2048 0
        model.layers.0.self_attn.q_proj.weight 4096,2048 0
        model.layers.0.self_attn.k_proj.weight 512,2048 0
        model.layers.0.self_attn.o_proj.weight 2048,4096 1
        model.layers.0.self_attn.q_norm.weight 128 -
        model.layers.0.self_attn.k_norm.weight 128 -
        model.layers.0.mlp.gate.weight 128,2048 -
        model.layers.0.mlp.experts.0.gate_proj.weight 768,2048 0
        model.layers.0.mlp.experts.0.up_proj.weight 768,2048 0
        model.layers.0.mlp.experts.0.down_proj.weight 2048,768 1
        model.norm.weight 2048 -""",
    "Qwen2-MoE": """
        model.layers.0.mlp.gate.weight 60,2048 -
        model.layers.0.mlp.shared_expert.gate_proj.weight 5632,2048 0
        model.layers.0.mlp.shared_expert.down_proj.weight 2048,5632 1
        model.layers.0.mlp.shared_expert_gate.weight 1,2048 -""",
    "Mixtral": """
        model.layers.0.block_sparse_moe.gate.weight 8,4096 -
        model.layers.0.block_sparse_moe.experts.0.w1.weight 14336,4096 0
        model.layers.0.block_sparse_moe.experts.0.w2.weight 4096,14336 1
        model.layers.0.block_sparse_moe.experts.0.w3.weight 14336,4096 0
        model.layers.0.input_layernorm.weight 4096 -""",
    "DeepSeek-V3": """
        model.embed_tokens.weight 129280,7168 0
        model.layers.3.self_attn.q_a_proj.weight 1536,7168 -
        model.layers.3.self_attn.q_a_layernorm.weight 1536 -
        model.layers.3.self_attn.q_b_proj.weight 24576,1536 0
        model.layers.3.self_attn.kv_a_proj_with_mqa.weight 576,7168 -
        model.layers.3.self_attn.kv_a_layernorm.weight 512 -
        model.layers.3.self_attn.kv_b_proj.weight 32768,512 0
        model.layers.3.self_attn.o_proj.weight 7168,16384 1
        model.layers.3.self_attn.o_proj.weight_scale_inv 56,128 1
        model.layers.3.mlp.gate.weight 256,7168 -
        model.layers.3.mlp.gate.e_score_correction_bias 256 -
        model.layers.3.mlp.experts.0.gate_proj.weight 2048,7168 0
        model.layers.3.mlp.experts.0.gate_proj.weight_scale_inv 16,56 0
        model.layers.3.mlp.experts.0.down_proj.weight 7168,2048 1
        model.layers.3.mlp.shared_experts.up_proj.weight 2048,7168 0
        model.layers.3.mlp.shared_experts.down_proj.weight 7168,2048 1
        model.layers.61.eh_proj.weight 7168,14336 -
        model.layers.61.shared_head.head.weight 129280,7168 0
        model.layers.61.shared_head.norm.weight 7168 -
        lm_head.weight 129280,7168 0""",
    "DeepSeek-V3 as first published": """
        embed.weight 129280,7168 0
        layers.3.attn.wq_a.weight 1536,7168 -
        layers.3.attn.wq_b.weight 24576,1536 0
        layers.3.attn.wkv_a.weight 576,7168 -
        layers.3.attn.wkv_b.weight 32768,512 0
        layers.3.attn.wo.weight 7168,16384 1
        layers.3.ffn.gate.weight 256,7168 -
        layers.3.ffn.gate.bias 256 -
        layers.3.ffn.experts.0.w1.weight 2048,7168 0
        layers.3.ffn.experts.0.w2.weight 7168,2048 1
        layers.3.ffn_norm.weight 7168 -
        head.weight 129280,7168 0""",
    "Gemma": """
        model.embed_tokens.weight 256000,3072 0
        model.layers.0.self_attn.q_proj.weight 4096,3072 0
        model.layers.0.self_attn.o_proj.weight 3072,4096 1
        model.layers.0.mlp.gate_proj.weight 24576,3072 0
        model.layers.0.mlp.down_proj.weight 3072,24576 1
        model.layers.0.pre_feedforward_layernorm.weight 3072 -""",
    "Gemma of Flax": """
        transformer/embedder/input_embedding 256128,2048 0
        transformer/layer_0/attn/q_einsum/w 8,2048,256 0
        transformer/layer_0/attn/kv_einsum/w 2,1,2048,256 -
        transformer/layer_0/attn/attn_vec_einsum/w 8,256,2048 0
        transformer/layer_0/mlp/gating_einsum/w 2,2048,16384 2
        transformer/layer_0/mlp/linear/w 16384,2048 0
        transformer/layer_0/pre_attention_norm/scale 2048 -
        transformer/final_norm/scale 2048 -""",
    "Gemma of Flax, gates turned round": """
        transformer/layer_0/attn/qkv_einsum/w 3,16,3072,256 1
        transformer/layer_0/mlp/gating_einsum 2,24576,3072 1
        transformer/layer_0/mlp/linear 24576,3072 0
        transformer/layer_0/pre_ffw_norm/scale 3072 -""",
    "Phi-3": """
        model.embed_tokens.weight 32064,3072 0
        model.layers.0.self_attn.qkv_proj.weight 9216,3072 x
        model.layers.0.self_attn.o_proj.weight 3072,3072 1
        model.layers.0.mlp.gate_up_proj.weight 16384,3072 x
        model.layers.0.mlp.down_proj.weight 3072,8192 1""",
    "Phi-2": """
        model.layers.0.self_attn.q_proj.weight 2560,2560 0
        model.layers.0.self_attn.q_proj.bias 2560 0
        model.layers.0.self_attn.dense.weight 2560,2560 1
        model.layers.0.self_attn.dense.bias 2560 -
        model.layers.0.mlp.fc1.weight 10240,2560 0
        model.layers.0.mlp.fc1.bias 10240 0
        model.layers.0.mlp.fc2.weight 2560,10240 1
        model.layers.0.mlp.fc2.bias 2560 -""",
    "GPT-2": """
        transformer.wte.weight 50257,768 0
        transformer.wpe.weight 1024,768 -
        transformer.h.0.ln_1.weight 768 -
        transformer.h.0.attn.bias 1,1,1024,1024 -
        transformer.h.0.attn.masked_bias scalar -
        transformer.h.0.attn.c_attn.weight 768,2304 x
        transformer.h.0.attn.c_attn.bias 2304 x
        transformer.h.0.attn.c_proj.weight 768,768 0
        transformer.h.0.attn.c_proj.bias 768 -
        transformer.h.0.mlp.c_fc.weight 768,3072 1
        transformer.h.0.mlp.c_fc.bias 3072 0
        transformer.h.0.mlp.c_proj.weight 3072,768 0
        transformer.ln_f.bias 768 -
        lm_head.weight 50257,768 0""",
    "GPT-2 without biases": """
        wte.weight 50257,768 0
        h.0.ln_1.weight 768 -
        h.0.attn.c_proj.weight 768,768 0
        h.0.mlp.c_fc.weight 768,3072 1
        h.0.mlp.c_proj.weight 3072,768 0""",
    "GPT-2 without its table": """
        h.0.mlp.c_fc.weight 768,3072 1
        h.0.mlp.c_fc.bias 3072 0
        lm_head.weight 50257,768 0""",
    "GPT-2 with layers of PyTorch": """
        transformer.wte.weight 50304,768 0
        transformer.h.0.ln_1.weight 768 -
        transformer.h.0.attn.c_proj.weight 768,768 1
        transformer.h.0.mlp.c_fc.weight 3072,768 0
        transformer.h.0.mlp.c_proj.weight 768,3072 1""",
    "GPT-2 of Flax, whose kernels are [out, in]": """
        transformer/wte/embedding 50257,768 0
        transformer/wpe/embedding 1024,768 -
        transformer/h/0/attn/c_proj/kernel 768,768 1
        transformer/h/0/attn/c_proj/bias 768 -
        transformer/h/0/mlp/c_fc/kernel 3072,768 0
        transformer/h/0/mlp/c_fc/bias 3072 0
        transformer/h/0/mlp/c_proj/kernel 768,3072 1
        transformer/h/0/mlp/c_proj/bias 768 -""",
    "a square weight of which nothing tells": "h.0.attn.c_proj.weight 768,768 x",
    "GPT-NeoX": """
        gpt_neox.embed_in.weight 50688,4096 0
        gpt_neox.layers.0.attention.query_key_value.weight 12288,4096 0
        gpt_neox.layers.0.attention.query_key_value.bias 12288 0
        gpt_neox.layers.0.attention.dense.weight 4096,4096 1
        gpt_neox.layers.0.attention.dense.bias 4096 -
        gpt_neox.layers.0.attention.bias 1,1,2048,2048 -
        gpt_neox.layers.0.mlp.dense_h_to_4h.weight 16384,4096 0
        gpt_neox.layers.0.mlp.dense_h_to_4h.bias 16384 0
        gpt_neox.layers.0.mlp.dense_4h_to_h.weight 4096,16384 1
        gpt_neox.layers.0.mlp.dense_4h_to_h.bias 4096 -
        gpt_neox.final_layer_norm.weight 4096 -
        embed_out.weight 50688,4096 0""",
    "T5": """
        shared.weight 32128,512 0
        encoder.block.0.layer.0.SelfAttention.q.weight 384,512 0
        encoder.block.0.layer.0.SelfAttention.o.weight 512,384 1
        encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight 32,8 1
        encoder.block.0.layer.0.layer_norm.weight 512 -
        encoder.block.0.layer.1.DenseReluDense.wi_0.weight 1024,512 0
        encoder.block.0.layer.1.DenseReluDense.wo.weight 512,1024 1
        decoder.block.0.layer.1.EncDecAttention.k.weight 384,512 0
        lm_head.weight 32128,512 0""",
    "T5 of Flax": """
        shared/embedding 32128,512 0
        encoder/block/0/layer/0/SelfAttention/q/kernel 512,512 1
        encoder/block/0/layer/0/SelfAttention/o/kernel 512,512 0
        encoder/block/0/layer/0/SelfAttention/relative_attention_bias/embedding 32,8 1
        encoder/block/0/layer/1/DenseReluDense/wi/kernel 512,2048 1
        encoder/block/0/layer/1/DenseReluDense/wo/kernel 2048,512 0
        encoder/final_layer_norm/weight 512 -
        lm_head/kernel 512,32128 1""",
    "T5X": """
        token_embedder/embedding 32128,768 0
        encoder/relpos_bias/rel_embedding 12,32 0
        encoder/layers_0/attention/query/kernel 768,768 1
        encoder/layers_0/attention/out/kernel 768,768 0
        encoder/layers_0/mlp/wi_0/kernel 768,2048 1
        encoder/layers_0/mlp/wo/kernel 2048,768 0
        encoder/layers_0/pre_mlp_layer_norm/scale 768 -
        decoder/logits_dense/kernel 768,32128 1""",
    "BERT": """
        bert.embeddings.word_embeddings.weight 30522,768 0
        bert.embeddings.position_embeddings.weight 512,768 -
        bert.embeddings.token_type_embeddings.weight 2,768 -
        bert.embeddings.LayerNorm.weight 768 -
        bert.encoder.layer.0.attention.self.query.weight 768,768 0
        bert.encoder.layer.0.attention.self.query.bias 768 0
        bert.encoder.layer.0.attention.output.dense.weight 768,768 1
        bert.encoder.layer.0.attention.output.dense.bias 768 -
        bert.encoder.layer.0.attention.output.LayerNorm.weight 768 -
        bert.encoder.layer.0.intermediate.dense.weight 3072,768 0
        bert.encoder.layer.0.intermediate.dense.bias 3072 0
        bert.encoder.layer.0.output.dense.weight 768,3072 1
        bert.encoder.layer.0.output.dense.bias 768 -
        bert.pooler.dense.weight 768,768 -
        cls.predictions.transform.dense.weight 768,768 -
        cls.predictions.transform.dense.bias 768 -
        cls.predictions.decoder.weight 30522,768 0
        cls.predictions.bias 30522 0
        cls.seq_relationship.weight 2,768 -""",
    "BERT of Flax": """
        bert/embeddings/word_embeddings/embedding 30522,768 0
        bert/embeddings/position_embeddings/embedding 512,768 -
        bert/embeddings/token_type_embeddings/embedding 2,768 -
        bert/encoder/layer/0/attention/self/value/kernel 768,768 1
        bert/encoder/layer/0/attention/output/dense/kernel 768,768 0
        bert/encoder/layer/0/intermediate/dense/kernel 768,3072 1
        bert/encoder/layer/0/output/dense/kernel 3072,768 0
        cls/predictions/bias 30522 0""",
    "Whisper": """
        model.encoder.conv1.weight 384,80,3 -
        model.encoder.conv1.bias 384 -
        model.encoder.embed_positions.weight 1500,384 -
        model.encoder.layers.0.self_attn.k_proj.weight 384,384 0
        model.encoder.layers.0.self_attn.v_proj.bias 384 0
        model.encoder.layers.0.self_attn.out_proj.weight 384,384 1
        model.encoder.layers.0.self_attn.out_proj.bias 384 -
        model.encoder.layers.0.fc1.weight 1536,384 0
        model.encoder.layers.0.fc2.weight 384,1536 1
        model.decoder.embed_tokens.weight 51865,384 0
        model.decoder.embed_positions.weight 448,384 -
        model.decoder.layers.0.encoder_attn.q_proj.weight 384,384 0
        model.decoder.layers.0.encoder_attn_layer_norm.weight 384 -
        proj_out.weight 51865,384 0""",
    "Whisper of Flax": """
        model/encoder/conv1/kernel 3,80,384 -
        model/encoder/embed_positions/embedding 1500,384 -
        model/decoder/embed_tokens/embedding 51865,384 0
        model/decoder/layers/0/self_attn/q_proj/kernel 384,384 1
        model/decoder/layers/0/encoder_attn/out_proj/kernel 384,384 0
        model/decoder/layers/0/fc1/kernel 384,1536 1
        model/decoder/layers/0/fc2/kernel 1536,384 0""",
    "Falcon of one key for all heads": """
        transformer.word_embeddings.weight 65024,4544 0
        transformer.h.0.self_attention.query_key_value.weight 4672,4544 x
        transformer.h.0.self_attention.dense.weight 4544,4544 1
        transformer.h.0.mlp.dense_h_to_4h.weight 18176,4544 0
        transformer.h.0.mlp.dense_4h_to_h.weight 4544,18176 1
        transformer.h.0.input_layernorm.weight 4544 -
        transformer.ln_f.weight 4544 -
        lm_head.weight 65024,4544 0""",
    "Falcon": """
        transformer.h.0.ln_attn.weight 8192 -
        transformer.h.0.self_attention.query_key_value.weight 9216,8192 x
        transformer.h.0.self_attention.dense.weight 8192,8192 1
        transformer.h.0.mlp.dense_h_to_4h.weight 32768,8192 0""",
    "OPT": """
        model.decoder.embed_tokens.weight 50272,512 0
        model.decoder.embed_positions.weight 2050,1024 -
        model.decoder.project_in.weight 1024,512 -
        model.decoder.project_out.weight 512,1024 -
        model.decoder.layers.0.self_attn.q_proj.weight 1024,1024 0
        model.decoder.layers.0.self_attn.q_proj.bias 1024 0
        model.decoder.layers.0.self_attn.out_proj.weight 1024,1024 1
        model.decoder.layers.0.self_attn_layer_norm.weight 1024 -
        model.decoder.layers.0.fc1.weight 4096,1024 0
        model.decoder.layers.0.fc1.bias 4096 0
        model.decoder.layers.0.fc2.weight 1024,4096 1
        lm_head.weight 50272,512 0""",
    "ViT": """
        vit.embeddings.cls_token 1,1,768 -
        vit.embeddings.position_embeddings 1,197,768 -
        vit.embeddings.patch_embeddings.projection.weight 768,3,16,16 -
        vit.embeddings.patch_embeddings.projection.bias 768 -
        vit.encoder.layer.0.attention.attention.query.weight 768,768 0
        vit.encoder.layer.0.attention.output.dense.weight 768,768 1
        vit.encoder.layer.0.intermediate.dense.weight 3072,768 0
        vit.encoder.layer.0.output.dense.weight 768,3072 1
        vit.encoder.layer.0.layernorm_before.weight 768 -
        classifier.weight 1000,768 -""",
    "CLIP": """
        text_model.embeddings.token_embedding.weight 49408,512 0
        text_model.embeddings.position_embedding.weight 77,512 -
        text_model.encoder.layers.0.self_attn.k_proj.weight 512,512 0
        text_model.encoder.layers.0.mlp.fc1.weight 2048,512 0
        text_model.encoder.layers.0.mlp.fc2.weight 512,2048 1
        vision_model.embeddings.class_embedding 768 -
        vision_model.embeddings.patch_embedding.weight 768,3,32,32 -
        vision_model.pre_layrnorm.weight 768 -
        vision_model.encoder.layers.0.self_attn.out_proj.weight 768,768 1
        vision_model.encoder.layers.0.layer_norm1.weight 768 -
        visual_projection.weight 512,768 -
        text_projection.weight 512,512 -
        logit_scale scalar -""",
    "CLIP as first published": """
        visual.conv1.weight 768,3,32,32 -
        visual.class_embedding 768 -
        visual.positional_embedding 50,768 -
        visual.transformer.resblocks.0.attn.in_proj_weight 2304,768 x
        visual.transformer.resblocks.0.attn.in_proj_bias 2304 x
        visual.transformer.resblocks.0.attn.out_proj.weight 768,768 1
        visual.transformer.resblocks.0.mlp.c_fc.weight 3072,768 0
        visual.transformer.resblocks.0.mlp.c_fc.bias 3072 0
        visual.transformer.resblocks.0.mlp.c_proj.weight 768,3072 1
        visual.transformer.resblocks.0.mlp.c_proj.bias 768 -
        visual.ln_post.weight 768 -
        visual.proj 768,512 x
        token_embedding.weight 49408,512 0
        text_projection 512,512 -""",
    "a picture's words by GPT-2": """
        encoder.encoder.layer.0.attention.attention.query.weight 768,768 0
        encoder.encoder.layer.0.intermediate.dense.weight 3072,768 0
        encoder.encoder.layer.0.intermediate.dense.bias 3072 0
        decoder.transformer.h.0.crossattention.q_attn.weight 768,768 1
        decoder.transformer.h.0.crossattention.c_proj.weight 768,768 0
        decoder.transformer.h.0.mlp.c_fc.weight 768,3072 1
        decoder.transformer.h.0.mlp.c_fc.bias 3072 0""",
    "a ViT of one projection for three": """
        blocks.0.attn.qkv.weight 2304,768 x
        blocks.0.attn.proj.weight 768,768 1
        blocks.0.mlp.fc1.weight 3072,768 0
        patch_embed.proj.weight 768,3,16,16 -
        pos_embed 1,197,768 -
        head.weight 1000,768 x""",
    "MaxText, experts without a layer of their name": """
        token_embedder/embedding 32000,4096 0
        decoder/layers_0/self_attention/query/kernel 4096,32,128 1
        decoder/layers_0/self_attention/key/kernel 4096,8,128 1
        decoder/layers_0/self_attention/out/kernel 32,128,4096 0
        decoder/layers_0/MoeBlock_0/gate/kernel 4096,8 -
        decoder/layers_0/MoeBlock_0/wi_0 8,4096,14336 x
        decoder/layers_0/MoeBlock_0/wo 8,14336,4096 x
        decoder/decoder_norm/scale 4096 -""",
    "MaxText, values of another size than keys": """
        token_embedder/embedding 129280,7168 0
        decoder/layers_0/self_attention/wq_b/kernel 1536,128,192 1
        decoder/layers_0/self_attention/wkv_b/kernel 512,128,256 1
        decoder/layers_0/self_attention/out/kernel 128,128,7168 0""",
    "T5X, layers along the second dimension": """
        token_embedder/embedding 32128,768 0
        encoder/encoder/attention/query/kernel 768,12,768 x
        encoder/encoder/attention/out/kernel 768,12,768 x
        encoder/encoder/mlp/wi_0/kernel 768,12,2048 x
        encoder/encoder/mlp/wo/kernel 2048,12,768 x""",
    "GPT-2 of Keras": """
        token_embedding/embeddings 50257,768 0
        position_embedding/embeddings 1024,768 -
        transformer_layer_0/self_attention/query/kernel 768,12,64 1
        transformer_layer_0/self_attention/query/bias 12,64 0
        transformer_layer_0/self_attention/attention_output/kernel 12,64,768 0
        transformer_layer_0/self_attention/attention_output/bias 768 -
        transformer_layer_0/feedforward_intermediate_dense/kernel 768,3072 1
        transformer_layer_0/feedforward_intermediate_dense/bias 3072 0
        transformer_layer_0/feedforward_output_dense/kernel 3072,768 0
        transformer_layer_0/feedforward_output_dense/bias 768 -""",
    "names written by hand": """
        embed 1000,64 0
        layers/0/W_q 64,64 1
        layers/0/W_o 64,64 0
        layers/0/w_up 64,256 1
        layers/0/w_gate 64,256 1
        layers/0/W_down 256,64 0
        lm_head 64,1000 1""",
    "ModernBERT, whose Wi are two": """
        embeddings.tok_embeddings.weight 50368,768 0
        layers.0.attn.Wqkv.weight 2304,768 x
        layers.0.attn.Wo.weight 768,768 1
        layers.0.mlp.Wi.weight 2304,768 x
        layers.0.mlp.Wo.weight 768,1152 1
        final_norm.weight 768 -""",
    "GLM, whose dense_h_to_4h are two": """
        encoder.layers.0.mlp.dense_h_to_4h.weight 27392,4096 x
        encoder.layers.0.mlp.dense_4h_to_h.weight 4096,13696 1
        encoder.layers.0.input_layernorm.weight 4096 -""",
    "Stable Diffusion, whose keys come from a text": """
        blocks.0.attn1.to_q.weight 320,320 0
        blocks.0.attn1.to_out.0.weight 320,320 1
        blocks.0.attn1.to_out.0.bias 320 -
        blocks.0.attn2.to_k.weight 320,768 0
        blocks.0.ff.net.2.weight 320,1280 x
        blocks.0.ff.net.2.bias 320 -
        blocks.0.norm1.weight 320 -""",
    "the same without a bias": """
        blocks.0.attn1.to_q.weight 320,320 x
        blocks.0.attn1.to_out.0.weight 320,320 x
        blocks.0.attn2.to_k.weight 320,768 x
        blocks.0.norm1.weight 320 -""",
    "RoBERTa's head": """
        roberta.embeddings.word_embeddings.weight 50265,768 0
        lm_head.dense.weight 768,768 x
        lm_head.dense.bias 768 -
        lm_head.layer_norm.weight 768 -
        lm_head.decoder.weight 50265,768 0
        lm_head.decoder.bias 50265 0""",
    "gpt-oss": """
        model.layers.0.self_attn.sinks 64 0
        model.layers.0.self_attn.q_proj.weight 4096,2880 0
        model.layers.0.self_attn.q_proj.bias 4096 0
        model.layers.0.self_attn.o_proj.weight 2880,4096 1
        model.layers.0.self_attn.o_proj.bias 2880 -
        model.layers.0.mlp.router.weight 32,2880 -
        model.layers.0.mlp.router.bias 32 -
        model.layers.0.mlp.experts.gate_up_proj 32,2880,5760 x
        model.layers.0.mlp.experts.gate_up_proj_bias 32,5760 x
        model.layers.0.mlp.experts.down_proj 32,2880,2880 1
        model.layers.0.mlp.experts.down_proj_bias 32,2880 -""",
    "adapters of PEFT": """
        layers.0.q_proj.base_layer.weight 4096,4096 0
        layers.0.q_proj.lora_A.default.weight 16,4096 -
        layers.0.q_proj.lora_B.default.weight 4096,16 0
        layers.0.k_proj.base_layer.weight 64,4096 0
        layers.0.k_proj.lora_A.default.weight 256,4096 -
        layers.0.k_proj.lora_B.default.weight 64,256 0
        layers.0.o_proj.base_layer.weight 4096,4096 1
        layers.0.o_proj.lora_A.default.weight 16,4096 1
        layers.0.o_proj.lora_B.default.weight 4096,16 -
        layers.0.q_proj.lora_magnitude_vector.default.weight 4096 0
        layers.0.mlp.gate.lora_A.weight 8,4096 -
        embed_tokens.base_layer.weight 32000,4096 0
        embed_tokens.lora_embedding_A.default 16,32000 1
        embed_tokens.lora_embedding_B.default 4096,16 -""",
    "adapters of Flax": """
        layers/0/q_proj/kernel 4096,4096 1
        layers/0/q_proj/lora_a 4096,16 -
        layers/0/q_proj/lora_b 16,4096 1
        layers/0/up/kernel 64,64 1
        layers/0/up/lora_a 64,64 -
        layers/0/up/lora_b 64,64 1
        layers/0/down_proj/lora_a 14336,16 0
        layers/0/down_proj/lora_b 16,4096 -
        layers/0/query/kernel 64,8,16 1
        layers/0/query/kernel_lora_b 4,8,16 1
        layers/0/attn/q_einsum/w 8,64,16 0
        layers/0/attn/q_einsum/w_lora_a 64,4 -
        layers/0/attn/q_einsum/w_lora_b 4,8,16 1
        layers/0/attn/attn_vec_einsum/w 8,16,64 0
        layers/0/attn/attn_vec_einsum/w_lora_a 8,16,4 0
        layers/0/attn/attn_vec_einsum/w_lora_b 4,64 -""",
    "adapters in a layer of their own": """
        layers/0/q_proj/kernel 64,64 1
        layers/0/q_proj/lora/a 64,4 -
        layers/0/q_proj/lora/b 4,64 1
        layers/0/k_proj.lora_down.weight 4,64 -
        layers/0/k_proj.lora_up.weight 64,4 0
        layers/0/o_proj.lora_down.weight 4,64 1
        layers/0/o_proj.lora_up.weight 64,4 -
        layers/0/v_proj/kernel 64,64 1
        layers/0/v_proj/hidden_adapter/first 64,4 x""",
    "DINOv2, whose w3 comes out": """
        blocks.0.attn.proj.weight 1536,1536 1
        blocks.0.attn.qkv.weight 4608,1536 x
        blocks.0.mlp.w12.weight 8192,1536 x
        blocks.0.mlp.w12.bias 8192 x
        blocks.0.mlp.w3.weight 1536,4096 1
        blocks.0.mlp.w3.bias 1536 -
        blocks.0.norm1.weight 1536 -""",
    "weights of 4 bits": """
        layers.0.up_proj.qweight 8,256 1
        layers.0.up_proj.scales 2,256 1
        layers.0.up_proj.qzeros 2,32 1
        layers.0.down_proj.qweight 32,64 0
        layers.0.down_proj.scales 8,64 0""",
    "Llama 2 of GPTQ": """
        model.embed_tokens.weight 32000,4096 0
        model.layers.0.self_attn.q_proj.qweight 512,4096 1 int32
        model.layers.0.self_attn.q_proj.qzeros 32,512 1 int32
        model.layers.0.self_attn.q_proj.scales 32,4096 1
        model.layers.0.self_attn.q_proj.g_idx 4096 - int32
        model.layers.0.self_attn.q_proj.bias 4096 0
        model.layers.0.self_attn.o_proj.qweight 512,4096 0 int32
        model.layers.0.self_attn.o_proj.qzeros 32,512 - int32
        model.layers.0.self_attn.o_proj.scales 32,4096 -
        model.layers.0.self_attn.o_proj.g_idx 4096 0 int32
        model.layers.0.self_attn.o_proj.bias 4096 -
        model.layers.0.mlp.down_proj.qweight 1376,4096 0 int32
        model.layers.0.mlp.down_proj.scales 86,4096 0
        model.layers.0.input_layernorm.weight 4096 -""",
    "Llama 2 of AWQ, one group": """
        model.embed_tokens.weight 32000,4096 0
        model.layers.0.self_attn.q_proj.qweight 4096,512 1 int32
        model.layers.0.self_attn.q_proj.qzeros 1,512 1 int32
        model.layers.0.self_attn.q_proj.scales 1,4096 1
        model.layers.0.self_attn.o_proj.qweight 4096,512 0 int32
        model.layers.0.self_attn.o_proj.qzeros 1,512 - int32
        model.layers.0.self_attn.o_proj.scales 1,4096 -
        model.layers.0.input_layernorm.weight 4096 -""",
    "qwix": """
        up_proj/kernel/array/qvalue 64,256 1 int8
        up_proj/kernel/array/scale 1,256 1
        up_proj/kernel/array/zero_point 1,256 1
        down_proj/kernel/array/qvalue 256,64 0 int8
        down_proj/kernel/array/scale 8,64 0
        query/w/qvalue 64,8,32 1 int8
        query/w/scale 1,8,1 1""",
    "AQT, in modules of its own": """
        up_proj/AqtDotGeneral_0/qrhs/frozen/qvalue 64,256 x int8
        up_proj/AqtDotGeneral_0/qrhs/frozen/scale/0 1,256 x""",
    "compressed tensors in the order of activations": """
        up_proj.weight_packed 512,16 0 int32
        up_proj.weight_scale 512,4 0
        up_proj.weight_g_idx 128 - int32
        down_proj.weight_packed 128,64 1 int32
        down_proj.weight_scale 128,3 -
        down_proj.weight_g_idx 512 0 int32
        down_proj.weight_shape 2 -""",
    "NVFP4 of ModelOpt": """
        model.layers.0.self_attn.q_proj.weight 4096,2048 0 uint8
        model.layers.0.self_attn.q_proj.weight_scale 4096,256 0 float8_e4m3fn
        model.layers.0.self_attn.q_proj.weight_scale_2 scalar -
        model.layers.0.self_attn.q_proj.input_scale scalar -
        model.layers.0.self_attn.q_proj.pre_quant_scale 4096 -
        model.layers.0.self_attn.k_proj.k_scale scalar -
        model.layers.0.self_attn.o_proj.weight 4096,2048 1 uint8
        model.layers.0.self_attn.o_proj.weight_scale 4096,256 1 float8_e4m3fn
        model.layers.0.self_attn.o_proj.weight_scale_2 scalar -
        model.layers.0.self_attn.o_proj.pre_quant_scale 4096 0
        model.layers.0.input_layernorm.weight 4096 -""",
    "compressed tensors": """
        model.layers.0.self_attn.q_proj.weight_packed 4096,512 0 int32
        model.layers.0.self_attn.q_proj.weight_scale 4096,32 0
        model.layers.0.self_attn.q_proj.weight_shape 2 -
        model.layers.0.self_attn.q_proj.weight_g_idx 4096 - int32
        model.layers.0.self_attn.o_proj.weight_packed 4096,512 1 int32
        model.layers.0.self_attn.o_proj.weight_scale 4096,32 1
        model.layers.0.self_attn.o_proj.weight_shape 2 -
        model.layers.0.mlp.up_proj.weight_packed 14336,2048 0 uint8
        model.layers.0.mlp.up_proj.weight_scale 14336,256 0
        model.layers.0.mlp.up_proj.weight_global_scale 1 -
        model.layers.0.mlp.down_proj.weight 4096,14336 1 float8_e4m3fn
        model.layers.0.mlp.down_proj.weight_scale 4096,1 -
        model.layers.0.mlp.down_proj.input_scale 1 -
        model.layers.0.input_layernorm.weight 4096 -""",
    "bitsandbytes": """
        layers.0.q_proj.weight 8388608,1 x uint8
        layers.0.q_proj.weight.absmax 262144 x uint8
        layers.0.q_proj.weight.quant_map 16 -
        layers.0.q_proj.weight.nested_quant_map 256 -
        layers.0.q_proj.weight.quant_state.bitsandbytes__nf4 90 - uint8
        layers.0.k_proj.weight 1024,4096 0 int8
        layers.0.k_proj.SCB 1024 0
        layers.0.k_proj.weight_format scalar - uint8
        layers.0.o_proj.weight 4096,4096 1 int8
        layers.0.o_proj.SCB 4096 -""",
    "gpt-oss in MXFP4": """
        model.layers.0.mlp.router.weight 32,2880 -
        model.layers.0.mlp.experts.gate_up_proj_blocks 32,5760,90,16 x uint8
        model.layers.0.mlp.experts.gate_up_proj_scales 32,5760,90 x uint8
        model.layers.0.mlp.experts.gate_up_proj_bias 32,5760 x
        model.layers.0.mlp.experts.down_proj_blocks 32,2880,90,16 2 uint8
        model.layers.0.mlp.experts.down_proj_scales 32,2880,90 2 uint8
        model.layers.0.mlp.experts.down_proj_bias 32,2880 -""",
    "MLX": """
        model.layers.0.self_attn.q_proj.weight 4096,512 0 uint32
        model.layers.0.self_attn.q_proj.scales 4096,64 0
        model.layers.0.self_attn.q_proj.biases 4096,64 0
        model.layers.0.self_attn.o_proj.weight 4096,512 1 uint32
        model.layers.0.self_attn.o_proj.scales 4096,64 1
        model.layers.0.self_attn.o_proj.biases 4096,64 1""",
    "llama.cpp": """
        token_embd.weight 32000,4096 0
        blk.0.attn_norm.weight 4096 -
        blk.0.attn_q.weight 4096,4096 0
        blk.0.attn_k.weight 1024,4096 0
        blk.0.attn_output.weight 4096,4096 1
        blk.0.ffn_gate.weight 14336,4096 0
        blk.0.ffn_down.weight 4096,14336 1
        blk.0.ffn_gate_inp.weight 8,4096 -
        output_norm.weight 4096 -
        output.weight 32000,4096 0""",
    "vectors of adapters": """
        layers.0.q_proj.base_layer.weight 4096,4096 0
        layers.0.q_proj.vera_lambda_b.default 4096 0
        layers.0.q_proj.vera_lambda_d.default 256 -
        layers.0.k_proj.base_layer.weight 1024,4096 0
        layers.0.k_proj.ia3_l.default 1024,1 0
        layers.0.o_proj.base_layer.weight 4096,4096 1
        layers.0.o_proj.vera_lambda_b.default 4096 -
        layers.0.down_proj.base_layer.weight 4096,14336 1
        layers.0.down_proj.ia3_l.default 1,14336 1
        layers.0.up_proj.base_layer.weight 14336,4096 0
        layers.0.up_proj.lora_E.default 8,1 -""",
    "Ling, whose queries, keys and values are blocks": """
        model.word_embeddings.weight 157184,4096 0
        model.layers.0.input_layernorm.weight 4096 -
        model.layers.0.attention.query_layernorm.weight 128 -
        model.layers.0.attention.query_key_value.weight 12288,4096 x
        model.layers.0.attention.dense.weight 4096,4096 1""",
    "BLOOM": """
        transformer.word_embeddings.weight 250880,4096 0
        transformer.word_embeddings_layernorm.weight 4096 -
        transformer.h.0.self_attention.query_key_value.weight 12288,4096 0
        transformer.h.0.self_attention.query_key_value.bias 12288 0
        transformer.h.0.self_attention.dense.weight 4096,4096 1
        transformer.h.0.mlp.dense_h_to_4h.weight 16384,4096 0""",
    "RWKV-4": """
        rwkv.embeddings.weight 50277,768 0
        rwkv.blocks.0.ln1.weight 768 -
        rwkv.blocks.0.attention.time_decay 768 0
        rwkv.blocks.0.attention.time_mix_key 1,1,768 -
        rwkv.blocks.0.attention.key.weight 768,768 0
        rwkv.blocks.0.attention.value.weight 768,768 0
        rwkv.blocks.0.attention.receptance.weight 768,768 0
        rwkv.blocks.0.attention.output.weight 768,768 1
        rwkv.blocks.0.feed_forward.time_mix_key 1,1,768 -
        rwkv.blocks.0.feed_forward.key.weight 3072,768 0
        rwkv.blocks.0.feed_forward.receptance.weight 768,768 -
        rwkv.blocks.0.feed_forward.value.weight 768,3072 1""",
    "RWKV-7 of kernels": """
        embeddings/embedding 65536,768 0
        layers/0/ffn_norm/scale 768 -
        layers/0/attn/k_proj/kernel 768,768 1
        layers/0/attn/o_proj/kernel 768,768 0
        layers/0/ffn/key/kernel 768,3072 1
        layers/0/ffn/value/kernel 3072,768 0""",
    "ESM-C": """
        embed.weight 64,960 0
        transformer.blocks.0.attn.layernorm_qkv.0.weight 960 -
        transformer.blocks.0.attn.layernorm_qkv.0.bias 960 -
        transformer.blocks.0.attn.layernorm_qkv.1.weight 2880,960 x
        transformer.blocks.0.attn.q_ln.weight 960 -
        transformer.blocks.0.attn.out_proj.weight 960,960 1""",
    "TransformerEngine": """
        layers.0.self_attention.layernorm_qkv.layer_norm_weight 1024 -
        layers.0.self_attention.layernorm_qkv.weight 3072,1024 x
        layers.0.self_attention.layernorm_qkv.bias 3072 x
        layers.0.self_attention.proj.weight 1024,1024 1
        layers.1.self_attention.layernorm_qkv.query_weight 1024,1024 0
        layers.1.self_attention.layernorm_qkv.query_bias 1024 0
        layers.0.layernorm_mlp.layer_norm_weight 1024 -
        layers.0.layernorm_mlp.fc1_weight 4096,1024 0
        layers.0.layernorm_mlp.fc1_bias 4096 0
        layers.0.layernorm_mlp.fc2_weight 1024,4096 1
        layers.0.layernorm_mlp.fc2_bias 1024 -
        layers.1.layernorm_mlp.fc1_weight 8192,1024 x
        layers.1.layernorm_mlp.fc1_bias 8192 x
        layers.1.layernorm_mlp.fc2_weight 1024,4096 1
        layers.0.norm_linear.weight 1024,1024 x
        layers.0.norm1.linear.weight 6144,1024 x""",
    "Megatron-Core": """
        decoder.layers.0.self_attention.linear_qkv.layer_norm_weight 1024 -
        decoder.layers.0.self_attention.linear_qkv.weight 3072,1024 x
        decoder.layers.0.self_attention.linear_proj.weight 1024,1024 1
        decoder.layers.0.self_attention.q_layernorm.weight 8,128 -
        decoder.layers.0.mlp.linear_fc1.weight 4096,1024 0
        decoder.layers.0.mlp.linear_fc1._extra_state 77 - uint8
        decoder.layers.0.mlp.linear_fc2.weight 1024,4096 1""",
    "Llama 3.2 Vision": """
        language_model.model.embed_tokens.weight 128264,4096 0
        vision_model.gated_positional_embedding.gate 1 -
        vision_model.gated_positional_embedding.embedding 1601,1280 -
        vision_model.gated_positional_embedding.tile_embedding.weight 9,8197120 -
        vision_model.pre_tile_positional_embedding.embedding.weight 9,5120 -
        vision_model.post_tile_positional_embedding.embedding.weight 10,5120 -
        vision_model.aspect_ratio_embedding.embedding.weight 10,5120 x
        speaker.embedding.weight 10,4096 x""",
    "KerasHub": """
        token_and_position_embedding/token_embedding/embeddings 30522,768 0
        token_and_position_embedding/position_embedding/embeddings 512,768 -""",
    "DeepSeek-V4": """
        layers.0.self_attn.compressor.kv_proj.weight 512,4096 -
        layers.0.self_attn.compressor.gate_proj.weight 512,4096 -
        layers.0.self_attn.indexer.wq_b.weight 8192,1536 -
        layers.0.self_attn.indexer.wk.weight 128,4096 -
        layers.0.self_attn.q_b_proj.weight 24576,1536 0""",
    "experts of [E, out, in]": """
        embed_tokens.weight 1024,128 0
        layers.0.mlp.experts.gate_up_proj 8,256,128 x
        layers.0.mlp.experts.down_proj 8,128,128 2
        layers.0.self_attn.q_proj.weight 128,128 0""",
    "experts of [E, in, out]": """
        embed_tokens.weight 1024,128 0
        layers.0.mlp.experts.gate_up_proj 8,128,256 x
        layers.0.mlp.experts.gate_up_proj_scale 8,1,256 x
        layers.0.mlp.experts.down_proj 8,128,128 1
        layers.0.mlp.experts.down_proj_scale 8,1,128 -
        layers.0.self_attn.q_proj.weight 128,128 0""",
    "square experts of which nothing tells": """
        embed_tokens.weight 1024,128 0
        layers.0.mlp.experts.up_proj 8,128,128 x
        layers.0.mlp.experts.down_proj 8,128,128 x
        layers.1.experts.w1 8,128,128 x""",
    "DBRX, whose experts lie one after the other": """
        transformer.wte.weight 100352,6144 0
        transformer.blocks.0.ffn.router.layer.weight 16,6144 -
        transformer.blocks.0.ffn.experts.mlp.w1 172032,6144 x
        transformer.blocks.0.ffn.experts.mlp.v1 172032,6144 x
        transformer.blocks.0.ffn.experts.mlp.w2 172032,6144 x""",
    "Mamba": """
        backbone.embedding.weight 50280,768 0
        backbone.layers.0.norm.weight 768 -
        backbone.layers.0.mixer.in_proj.weight 3072,768 x
        backbone.layers.0.mixer.conv1d.weight 1536,1,4 x
        backbone.layers.0.mixer.conv1d.bias 1536 x
        backbone.layers.0.mixer.x_proj.weight 80,1536 x
        backbone.layers.0.mixer.A_log 1536,16 x
        backbone.layers.0.mixer.D 1536 x
        backbone.layers.0.mixer.out_proj.weight 768,1536 1""",
    "Qwen3-Next": """
        model.layers.0.linear_attn.in_proj_qkvz.weight 12288,2048 x
        model.layers.0.linear_attn.in_proj_ba.weight 64,2048 x
        model.layers.0.linear_attn.conv1d.weight 8192,1,4 x
        model.layers.0.linear_attn.A_log 32 x
        model.layers.0.linear_attn.dt_bias 32 x
        model.layers.0.linear_attn.norm.weight 128 -
        model.layers.0.linear_attn.out_proj.weight 2048,4096 1
        model.layers.0.input_layernorm.weight 2048 -""",
    "FLUX, whose linear1 are four": """
        double_blocks.0.img_attn.qkv.weight 9216,3072 x
        double_blocks.0.img_attn.proj.weight 3072,3072 1
        single_blocks.0.linear1.weight 21504,3072 x
        single_blocks.0.linear1.bias 21504 x
        single_blocks.0.linear2.weight 3072,15360 1
        single_blocks.0.pre_norm.weight 3072 -""",
    "Transformer-XL": """
        transformer.layers.0.pos_ff.CoreNet.0.weight 4096,1024 x
        transformer.layers.0.positionwise_ff.w_1.weight 4096,1024 x
        transformer.layers.0.self_attn.pos_proj.weight 1024,1024 x
        transformer.r_emb.weight 512,1024 x""",
}


def wanted(text):
    """By name, an array and the dimension that is sharded."""
    found = {}
    for line in text.strip().splitlines():
        name, sizes, dim, *dtype = line.split()
        shape = () if sizes == "scalar" else tuple(map(int, sizes.split(",")))
        found[name] = jax.ShapeDtypeStruct(shape, *dtype or ["bfloat16"]), dim
    return found


def nested(arrays):
    """The same as a tree, where no array's name begins another's."""
    tree, arrays = {}, {name.replace(".", "/"): x for name, x in arrays.items()}
    if any(other.startswith(f"{name}/") for name in arrays for other in arrays):
        return arrays
    for name, x in arrays.items():
        *parts, last = name.split("/")
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = x
    return tree


@pytest.mark.parametrize("family", FAMILIES)
def test_published_names(family):
    """Under their own names, with dots, and as a tree; all others hold without those refused."""
    table, mesh = wanted(FAMILIES[family]), AbstractMesh((2,), ("tp",))
    for tree in (str, lambda name: name.replace(".", "/")):
        arrays = {name: x for name, (x, _) in table.items()}
        params = arrays if tree is str else nested(arrays)
        refused = {tree(name) for name, (_, dim) in table.items() if dim == "x"}
        whole = ""
        if refused:
            with pytest.raises(LayoutError) as found:
                tensor_parallel(params, mesh)
            assert {problem.path for problem in found.value.problems} == refused
            whole = "|".join(refused)
        rules = tensor_parallel(params, mesh, whole=whole)
        assert {name: rules.match(tree(name)) for name in table} == {
            name: P() if dim in "-x" else P(*[None] * int(dim), "tp")
            for name, (_, dim) in table.items()
        }


D, HEADS, SIZE, HIDDEN = 32, 4, 8, 96


def attend(q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    return jnp.einsum("bhts,bshd->bthd", scores, v).reshape(*q.shape[:2], -1)


def attention(names, by_head):
    """Fused queries, keys and values: in blocks, or those of each head together."""
    qkv, dense = (
        (f"{name}.weight", shape)
        for name, shape in zip(names, ((3 * HEADS * SIZE, D), (D, HEADS * SIZE)), strict=True)
    )

    def block(p, x):
        shape = (HEADS, 3 * SIZE) if by_head else (3 * HEADS, SIZE)
        x = (x @ p[qkv[0]].T).reshape(*x.shape[:2], *shape)
        return attend(*jnp.split(x, 3, 3 if by_head else 2)) @ p[dense[0]].T

    return dict([qkv, dense]), block


def mlp(up, down, gate=None, outputs_first=True):
    def block(p, x):
        w = {name: y.T if outputs_first else y for name, y in p.items()}
        h = x @ w[up]
        h = jax.nn.relu(h) ** 2 if gate is None else jax.nn.silu(x @ w[gate]) * h
        return h @ w[down]

    shapes = {up: (HIDDEN, D), down: (D, HIDDEN)} | ({gate: (HIDDEN, D)} if gate else {})
    return {n: s if outputs_first else s[::-1] for n, s in shapes.items()}, block


def channel_mix(key, value, receptance):
    shapes, inner = mlp(key, value)
    gated = lambda p, x: jax.nn.sigmoid(x @ p[receptance].T) * inner(p, x)  # noqa: E731
    return shapes | {receptance: (D, D)}, gated


def time_mix(before):
    names = [f"{before}.{name}.weight" for name in ("key", "value", "receptance", "output")]

    def block(p, x):
        k, v, r = (x @ p[name].T for name in names[:3])

        def step(state, kv):
            state = state * jnp.exp(-jnp.exp(p[f"{before}.time_decay"])) + jnp.exp(kv[0]) * kv[1]
            return state, state

        states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), (k.swapaxes(0, 1), v.swapaxes(0, 1)))
        return (jax.nn.sigmoid(r) * states[1].swapaxes(0, 1)) @ p[names[3]].T

    return dict.fromkeys(names, (D, D)) | {f"{before}.time_decay": (D,)}, block


def experts(hidden, outputs_first):
    """Three of them, so that two devices share each."""
    names = [f"mlp.experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    shapes = dict(zip(names, [(3, hidden, D)] * 2 + [(3, D, hidden)], strict=True))

    def block(p, x):
        gate, up, down = (p[n].swapaxes(1, 2) if outputs_first else p[n] for n in names)
        h = jax.nn.silu(jnp.einsum("btd,edf->ebtf", x, gate)) * jnp.einsum("btd,edf->ebtf", x, up)
        return jnp.einsum("ebtf,efd->btd", h, down)

    return {
        name: shape if outputs_first else (shape[0], *shape[:0:-1])
        for name, shape in shapes.items()
    }, block


BLOCKS = {
    "queries, keys and values in blocks": attention(
        ("attention.query_key_value", "attention.dense"), by_head=False
    ),
    "the same in GPT-NeoX": attention(
        ("gpt_neox.attention.query_key_value", "gpt_neox.attention.dense"), by_head=True
    ),
    "in a module of their norm": attention(
        ("attn.layernorm_qkv.1", "attn.out_proj"), by_head=False
    ),
    "gated MLP": mlp("mlp.up_proj.weight", "mlp.down_proj.weight", "mlp.gate_proj.weight"),
    "gated MLP of kernels": mlp("up/kernel", "down/kernel", "gate/kernel", outputs_first=False),
    "MLP in a module of its norm": mlp("layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight"),
    "linear in a module of its norm": mlp("norm_linear.weight", "fc2.weight"),
    "channel mix": channel_mix("ffn.key.weight", "ffn.value.weight", "ffn.receptance.weight"),
    "channel mix of another name": mlp(
        "l/channels/key/kernel", "l/channels/value/kernel", None, False
    ),
    "time mix": time_mix("att"),
    "experts of [E, out, in]": experts(HIDDEN, outputs_first=True),
    "experts of [E, in, out]": experts(HIDDEN, outputs_first=False),
    "square experts": experts(D, outputs_first=True),
}
REFUSED = {  # all others are right by name
    "queries, keys and values in blocks": {"attention.query_key_value.weight"},
    "in a module of their norm": {"attn.layernorm_qkv.1.weight"},
    "linear in a module of its norm": {"norm_linear.weight"},
    "square experts": {f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_roles_by_name_are_those_by_function(name):
    shapes, block = BLOCKS[name]
    params = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()}
    params["input_layernorm.weight"] = jax.ShapeDtypeStruct((D,), "float32")

    def loss(params, x):
        return jnp.sum(x + block(params, x * params["input_layernorm.weight"]))

    mesh = AbstractMesh((2,), ("tp",))
    x = jax.ShapeDtypeStruct((2, 6, D), "float32")
    said = []
    inferred = infer_layout(loss, params, x, mesh, show=said.append)
    refused = REFUSED.get(name, set())
    if refused:
        with pytest.raises(LayoutError) as found:
            tensor_parallel(params, mesh)
        assert {problem.path for problem in found.value.problems} == refused
        parts_move = any("whose parts move between devices" in line for line in said)
        assert parts_move == ("tells from the function whether its parts" in str(found.value))
    rules = tensor_parallel(params, mesh, whole="|".join(refused))
    for path in set(params) - refused:
        assert rules.match(path) == inferred.match(path), path
