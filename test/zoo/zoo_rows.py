"""The architectures of transformers and torchvision that the zoo trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zoo_tasks import IMAGE, IMAGE_TOKEN, VOCAB


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers, or a factory of torchvision.models.

    `task` says what it is trained on: a key of TASKS (zoo_tasks.py), or torchvision (images).
    `changes` are further keys of the configuration (a dict changes a configuration within it), or
    arguments of the factory. `inputs` are further inputs, or other ones, than the task's.
    """

    name: str
    task: str
    changes: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.name}-{self.task}"


def _rows(
    task: str, names: str, inputs: dict[str, Any] | None = None, **changes: Any
) -> list[Architecture]:
    return [Architecture(name, task, changes, inputs or {}) for name in names.split()]


ARCHITECTURES = [
    *_rows(
        "causal",
        "llama mistral ministral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 "
        "gpt_neox gptj opt bloom falcon mpt stablelm starcoder2 olmo olmo2 olmo3 cohere cohere2 "
        "granite glm glm4 persimmon codegen biogpt xglm ctrl openai-gpt gpt_bigcode nemotron "
        "helium smollm3 ernie4_5 exaone4 seed_oss arcee apertus diffllama hunyuan_v1_dense "
        "jais2 nanochat modernbert-decoder bitnet mamba falcon_mamba",
    ),
    *_rows("causal", "gpt_neo", attention_types=[[["global", "local", "global"], 1]]),
    *_rows(
        "masked",
        "bert roberta albert distilbert electra deberta deberta-v2 mpnet camembert xlm-roberta "
        "layoutlm squeezebert mobilebert convbert roformer nystromformer fnet ernie rembert ibert "
        "megatron-bert modernbert data2vec-text eurobert esm longformer big_bird "
        "roberta-prelayernorm luke mra yoso",
    ),
    *_rows(
        "seq2seq",
        "bart mbart pegasus m2m_100 blenderbot blenderbot-small led plbart mvp "
        "bigbird_pegasus fsmt pegasus_x",
    ),
    *_rows("seq2seq", "t5 mt5 umt5 longt5 switch_transformers", decoder_start_token_id=1),
    *_rows("seq2seq", "marian", decoder_vocab_size=VOCAB),
    *_rows(
        "image",
        "vit beit resnet regnet mobilenet_v1 mobilenet_v2 "
        "mobilevit poolformer dinov2 dinov2_with_registers "
        "data2vec-vision focalnet ijepa vit_msn cvt bit swiftformer "
        "hgnet_v2 textnet",
    ),
    *_rows(
        "image", "swin swinv2", embed_dim=16, depths=[2], num_heads=[2], window_size=2, patch_size=4
    ),
    *_rows("image", "convnext convnextv2", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2),
    *_rows(
        "image",
        "pvt_v2 segformer",
        hidden_sizes=[16, 32],
        depths=[2, 2],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
    ),
    *_rows(
        "audio",
        "wav2vec2 hubert unispeech unispeech-sat wavlm data2vec-audio sew sew-d",
        apply_spec_augment=False,  # its spans are drawn by NumPy
    ),
    *_rows(
        "torchvision",
        "resnet18 resnet50 vgg11_bn densenet121 mobilenet_v2 mobilenet_v3_small efficientnet_b0 "
        "convnext_tiny swin_t swin_v2_t regnet_y_400mf squeezenet1_1 shufflenet_v2_x0_5 "
        "mnasnet0_5 alexnet wide_resnet50_2 resnext50_32x4d",
    ),
    *_rows("torchvision", "vit_b_16", image_size=IMAGE),
    *_rows("torchvision", "maxvit_t", input_size=(224, 224)),
    # Mixtures of experts.
    *_rows(
        "causal",
        "mixtral qwen2_moe qwen3_moe olmoe phimoe gpt_oss granitemoe granitemoeshared "
        "jetmoe minimax minimax_m2 ernie4_5_moe glm4_moe hunyuan_v1_moe flex_olmo afmoe aria_text "
        "mimo_v2_flash llama4_text solar_open exaone_moe laguna doge cohere2_moe mellum",
    ),
    *_rows("causal", "zaya", num_experts_per_tok=1),
    *_rows(
        "causal",
        "deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa minicpm3 youtu",
        num_key_value_heads=4,
    ),
    *_rows("causal", "dots1", n_shared_experts=1),
    *_rows("causal", "lfm2_moe", layer_types=["conv", "full_attention", "conv"]),
    *_rows(
        "causal",
        "longcat_flash",
        ffn_hidden_size=64,
        expert_ffn_hidden_size=32,
        moe_topk=2,
        num_key_value_heads=4,
        zero_expert_num=2,
    ),
    *_rows(
        "causal",
        "dbrx",
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 64},
    ),
    # State spaces, recurrences and hybrids.
    *_rows("causal", "rwkv", attention_hidden_size=32, context_length=64),
    *_rows("causal", "recurrent_gemma", lru_width=32),
    *_rows("causal", "lfm2 nemotron_h"),
    *_rows("causal", "mamba2", num_heads=8, head_dim=8, n_groups=2, state_size=8, chunk_size=8),
    *_rows("causal", "jamba", attn_layer_period=2, attn_layer_offset=1),
    *_rows(
        "causal",
        "bamba",
        attn_layer_indices=[1],
        mamba_chunk_size=8,
    ),
    *_rows(
        "causal",
        "granitemoehybrid",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_chunk_size=8,
        shared_intermediate_size=32,
    ),
    *_rows(
        "causal",
        "falcon_h1",
        mamba_d_ssm=64,
        mamba_chunk_size=8,
    ),
    *_rows(
        "causal",
        "zamba",
        layers_block_type=["hybrid", "linear_attention", "hybrid"],
        attention_head_dim=16,
        num_key_value_heads=4,
    ),
    *_rows(
        "causal",
        "zamba2",
        layers_block_type=["linear_attention", "hybrid", "linear_attention"],
        num_key_value_heads=4,
        mamba_headdim=8,
        chunk_size=8,
    ),
    *_rows(
        "causal",
        "qwen3_next qwen3_5_text qwen3_5_moe_text olmo_hybrid",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
    ),
    *_rows(
        "causal",
        "kimi_linear",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        linear_head_dim=8,
        linear_num_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
    ),
    *_rows("causal", "hrm_text"),
    # Other text.
    *_rows(
        "causal",
        "xlnet xlm gpt_neox_japanese bert-generation cpmant vaultgemma "
        "ministral3 internlm3 hyperclovax cwm granite_swa trocr prophetnet "
        "fuyu moshi iquestcoder",
    ),
    *_rows(
        "causal",
        "roc_bert",
        pronunciation_vocab_size=64,
        shape_vocab_size=64,
        pronunciation_embed_dim=32,
        shape_embed_dim=32,
    ),
    *_rows("causal", "xmod", languages=["en_XX"], default_language="en_XX", is_decoder=True),
    *_rows(
        "causal",
        "reformer",
        is_decoder=True,
        axial_pos_shape=(4, 4),
        axial_pos_embds_dim=(16, 16),
        attention_head_size=8,
        feed_forward_size=64,
        attn_layers=["local", "lsh", "local"],
        num_buckets=4,
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
    ),
    *_rows(
        "causal",
        "gemma3n_text",
        activation_sparsity_pattern=[0.0, 0.0, 0.0],
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=16,
    ),
    *_rows(
        "masked",
        "flaubert tapas xlm xlm-roberta-xl nomic_bert gte jina_embeddings_v3",
    ),
    *_rows("masked", "esmc", num_key_value_heads=4),
    *_rows("masked", "neomme", head_dim=16),
    *_rows("masked", "xmod", languages=["en_XX"], default_language="en_XX"),
    *_rows("masked", "funnel", block_sizes=[3, 1], d_head=8, d_inner=64, num_decoder_layers=1),
    *_rows(
        "masked",
        "perceiver",
        inputs={"input_ids": ("tokens", (64,))},
        num_latents=8,
        d_latents=32,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
    ),
    *_rows("seq2seq", "nllb-moe prophetnet t5gemma seamless_m4t"),
    *_rows("classification", "canine xlnet"),
    *_rows("classification", "lilt", inputs={"bbox": ("ones", (16, 4))}, hidden_size=48),
    *_rows("token-classification", "bros", inputs={"bbox": (16, 8)}, hidden_size=128),
    *_rows(
        "classification",
        "layoutlmv3",
        inputs={"bbox": ("classes", (16, 4))},
        coordinate_size=6,
        shape_size=4,
        input_size=32,
    ),
    *_rows("classification", "markuplm", xpath_unit_hidden_size=8, max_depth=4),
    *_rows("question", "splinter"),
    *_rows("text-encoder", "clip_text_model dpr visual_bert"),
    *_rows(
        "text-encoder",
        "lxmert",
        inputs={"visual_feats": (4, 32), "visual_pos": (4, 4)},
        visual_feat_dim=32,
        l_layers=2,
        x_layers=2,
        r_layers=2,
    ),
    # Vision.
    *_rows("image", "clip siglip metaclip_2"),
    *_rows("image", "donut-swin", embed_dim=16, depths=[2], num_heads=[2], window_size=2),
    *_rows(
        "image",
        "hiera",
        image_size=[32, 32],
        embed_dim=16,
        depths=[1, 2],
        num_heads=[1, 2],
        num_query_pool=1,
    ),
    *_rows(
        "image",
        "mobilevitv2",
        inputs={"pixel_values": (3, 64, 64)},
        patch_size=2,
        width_multiplier=0.25,
    ),
    *_rows("image", "efficientnet", width_coefficient=0.25, depth_coefficient=0.5, hidden_dim=320),
    *_rows(
        "image",
        "pvt",
        hidden_sizes=[16, 32],
        depths=[2, 2],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
        patch_sizes=[4, 2],
        sequence_reduction_ratios=[2, 1],
    ),
    *_rows("image-classifier", "deit"),
    *_rows(
        "image-classifier",
        "levit",
        inputs={"pixel_values": (3, 64, 64)},
        image_size=64,
        patch_size=16,
    ),
    *_rows(
        "image",
        "siglip2",
        inputs={
            "pixel_values": (16, 192),
            "pixel_attention_mask": ("ones", (16,)),
            "spatial_shapes": ("fours", (2,)),
        },
        num_patches=16,
    ),
    *_rows("video", "timesformer", num_frames=4),
    *_rows("video", "vivit", num_frames=4, tubelet_size=[2, 8, 8]),
    *_rows("video", "videomae", num_frames=4),
    *_rows(
        "image-pretraining",
        "vit_mae",
        inputs={"noise": (16,)},
        decoder_hidden_size=32,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    ),
    *_rows(
        "image-encoder",
        "aimv2_vision_model mlcd_vision_model clip_vision_model "
        "siglip_vision_model vitdet pixtral idefics3_vision radio pixio",
    ),
    *_rows("image-encoder", "dinov3_vit", num_register_tokens=4),
    *_rows("image-encoder", "dinov3_convnext", hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 2, 1]),
    *_rows(
        "image-encoder",
        "sam_vision_model",
        global_attn_indexes=[1],
        window_size=2,
        output_channels=16,
        num_pos_feats=8,
    ),
    *_rows(
        "image-encoder",
        "swin2sr maskformer-swin",
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=2,
        patch_size=1,
    ),
    *_rows("detection", "yolos", image_size=[64, 64], num_detection_tokens=8),
    *_rows(
        "detection",
        "detr conditional_detr deformable_detr",
        backbone_config={
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "out_features": ["stage4"],
        },
        num_queries=8,
    ),
    *_rows(
        "depth",
        "dpt",
        num_hidden_layers=4,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[16, 16, 16, 16],
        fusion_hidden_size=16,
    ),
    *_rows(
        "depth",
        "glpn",
        hidden_sizes=[16, 32, 32, 32],
        depths=[1, 2, 1, 1],
        num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=16,
    ),
    *_rows(
        "depth",
        "depth_anything",
        backbone_config={
            "model_type": "dinov2",
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "out_indices": [1, 2, 3, 4],
            "reshape_hidden_states": False,
        },
        reassemble_hidden_size=32,
        neck_hidden_sizes=[16, 16, 16, 16],
        fusion_hidden_size=16,
    ),
    # Two modalities.
    *_rows(
        "contrastive",
        "clip altclip chinese_clip blip metaclip_2 clipseg owlvit groupvit",
    ),
    *_rows("pair-encoder", "vilt flava aimv2 clip"),
    *_rows("contrastive", "siglip", text_config={"projection_size": 32}),
    *_rows("contrastive", "xclip", inputs={"pixel_values": (8, 3, 32, 32)}, projection_dim=512),
    *_rows(
        "contrastive",
        "align",
        projection_dim=80,
        text_config={},
        vision_config={"hidden_dim": 32, "width_coefficient": 0.25, "depth_coefficient": 0.5},
    ),
    *_rows("image-text", "git"),
    *_rows("image-text", "llava", image_token_id=IMAGE_TOKEN, vision_config={"patch_size": 16}),
    *_rows(
        "image-text",
        "paligemma",
        image_token_id=IMAGE_TOKEN,
        projection_dim=32,
        vision_config={"patch_size": 16, "projection_dim": 32},
    ),
    *_rows("image-text", "aya_vision", image_token_id=IMAGE_TOKEN),
    *_rows(
        "image-text",
        "internvl",
        image_token_id=IMAGE_TOKEN,
        vision_config={"image_size": [32, 32], "patch_size": [8, 8]},
    ),
    *_rows("image-text", "gemma3", image_token_id=IMAGE_TOKEN, mm_tokens_per_image=4),
    *_rows("image-text", "got_ocr2", image_token_id=IMAGE_TOKEN, image_seq_length=1),
    *_rows("image-text", "blip", text_config={"encoder_hidden_size": 32}),
    *_rows(
        "image-text",
        "blip-2",
        image_token_id=IMAGE_TOKEN,
        qformer_config={"encoder_hidden_size": 32},
        num_query_tokens=4,
    ),
    *_rows(
        "image-text",
        "idefics2 idefics3 smolvlm",
        image_token_id=IMAGE_TOKEN,
        inputs={"pixel_values": (1, 3, 32, 32)},
        perceiver_config={"resampler_n_latents": 4},
    ),
    *_rows(
        "image-text",
        "idefics",
        inputs={"pixel_values": (1, 3, 32, 32), "image_attention_mask": ("ones", (16, 1))},
    ),
    # Speech and sound.
    *_rows(
        "audio",
        "wav2vec2-conformer",
        apply_spec_augment=False,
        conv_dim=[32, 32],
        conv_kernel=[10, 3],
        conv_stride=[10, 5],
        num_feat_extract_layers=2,
    ),
    *_rows("features", "whisper"),
    *_rows(
        "features",
        "wav2vec2-bert",
        inputs={"input_features": (64, 16)},
        feature_projection_input_dim=16,
        apply_spec_augment=False,
    ),
    *_rows(
        "audio", "audio-spectrogram-transformer", inputs={"input_values": (64, 16)}, max_length=64
    ),
    *_rows("speech", "whisper"),
    *_rows(
        "speech",
        "speech_to_text",
        inputs={"input_features": (64, 16)},
        input_feat_per_channel=16,
        conv_channels=32,
    ),
    *_rows("waveform", "encodec"),
    *_rows("waveform", "dac", encoder_hidden_size=8, decoder_hidden_size=64, n_codebooks=2),
    *_rows("waveform", "mimi", upsample_groups=32),
    *_rows("spoken", "moonshine"),
    *_rows("spoken", "speecht5", apply_spec_augment=False),
    # Series.
    *_rows(
        "patches",
        "patchtst patchtsmixer",
        context_length=32,
        prediction_length=8,
        num_input_channels=3,
        patch_length=8,
        patch_stride=8,
    ),
    *_rows(
        "series",
        "time_series_transformer informer autoformer",
        context_length=16,
        prediction_length=8,
        lags_sequence=[1, 2, 3],
        num_time_features=2,
    ),
    *_rows("decision", "decision_transformer", state_dim=5, act_dim=3, max_ep_len=64),
]

BY_KEY = {architecture.key: architecture for architecture in ARCHITECTURES}
