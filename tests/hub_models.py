"""Models of KerasHub in small random configurations, with data for each.

`keras_hub` is imported when a model is made: on ranks, where its own warnings don't count.
"""

import warnings

import keras
import numpy as np
from keras import layers

VOCABULARY, LENGTH, BATCH = 64, 10, 4
SMALL = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
}
GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2}
IMAGE = (32, 32, 3)


def hub():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import keras_hub
    return keras_hub


def bert():
    models = hub().models
    backbone = models.BertBackbone(**SMALL, num_heads=2, max_sequence_length=LENGTH, dropout=0)
    return models.BertTextClassifier(backbone, num_classes=3, dropout=0)


def gpt2():
    models = hub().models
    backbone = models.GPT2Backbone(**SMALL, num_heads=2, max_sequence_length=LENGTH, dropout=0)
    return models.GPT2CausalLM(backbone)


def llama():
    models = hub().models
    return models.LlamaCausalLM(models.LlamaBackbone(**SMALL, **GROUPED))


def qwen():
    models = hub().models
    return models.QwenCausalLM(models.QwenBackbone(**SMALL, **GROUPED))


def mistral():
    models = hub().models
    return models.MistralCausalLM(models.MistralBackbone(**SMALL, **GROUPED, sliding_window=8))


def gemma():
    models = hub().models
    backbone = models.GemmaBackbone(**SMALL, num_query_heads=4, num_key_value_heads=1, head_dim=4)
    return models.GemmaCausalLM(backbone)


def t5():
    models = hub().models
    return models.T5Seq2SeqLM(models.T5Backbone(**SMALL, num_heads=2, dropout=0))


def whisper():
    backbone = hub().models.WhisperBackbone(
        **SMALL, num_heads=2, max_encoder_sequence_length=LENGTH, max_decoder_sequence_length=LENGTH
    )
    states = backbone.output["decoder_sequence_output"]
    return keras.Model(backbone.input, layers.Dense(VOCABULARY)(states))


def vit():
    models = hub().models
    backbone = models.ViTBackbone(
        image_shape=IMAGE, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
    )
    return models.ViTImageClassifier(backbone, num_classes=3)


def segformer():
    models = hub().models
    encoder = models.MiTBackbone(
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        image_shape=IMAGE,
        hidden_dims=[8, 16],
    )
    backbone = models.SegFormerBackbone(image_encoder=encoder, projection_filters=16)
    segmenter = models.SegFormerImageSegmenter(backbone, num_classes=3)
    for layer in segmenter._flatten_layers():
        if isinstance(layer, layers.Dropout):
            layer.rate = 0.0
    return segmenter


def diffusion():
    """One denoising step of Stable Diffusion 3: text encoders, diffuser and image decoder."""
    models = hub().models
    from keras_hub.src.models.vae.vae_backbone import VAEBackbone

    encoders = [
        models.CLIPTextEncoder(
            VOCABULARY,
            embedding_dim=hidden,
            hidden_dim=hidden,
            num_layers=2,
            num_heads=2,
            intermediate_dim=2 * hidden,
            intermediate_output_index=-2,
            max_sequence_length=LENGTH,
            name=name,
        )
        for name, hidden in (("clip_l", 8), ("clip_g", 16))
    ]
    vae = VAEBackbone([32] * 4, [1] * 4, [32] * 4, [1] * 4, sampler_method="mode")
    backbone = models.StableDiffusion3Backbone(
        mmdit_patch_size=2,
        mmdit_hidden_dim=16,
        mmdit_num_layers=2,
        mmdit_num_heads=2,
        mmdit_position_size=16,
        mmdit_qk_norm="rms_norm",
        mmdit_dual_attention_indices=(0,),
        vae=vae,
        clip_l=encoders[0],
        clip_g=encoders[1],
        image_shape=IMAGE,
    )
    # As its text-to-image task does: those that building the model leaves behind are no numbers.
    backbone.scheduler.set_sigmas(8)
    return backbone


MODELS = {
    f.__name__: f
    for f in (bert, gpt2, llama, qwen, mistral, gemma, t5, whisper, vit, segformer, diffusion)
}
# Those with a language model's `generate`.
WRITERS = ("gpt2", "llama", "qwen", "mistral", "gemma", "t5")


def inputs_of(model):
    """A batch of random inputs: tokens, masks without holes, images."""
    generator = np.random.default_rng(0)

    def draw(name, tensor):
        shape = (BATCH, *(LENGTH if size is None else size for size in tensor.shape[1:]))
        if name == "num_steps":
            return np.full(shape, 8, "int32")
        if "mask" in name:
            return np.ones(shape, "int32")
        if "segment" in name:
            return np.zeros(shape, "int32")
        if "int" in tensor.dtype:
            return generator.integers(1, VOCABULARY, shape).astype("int32")
        return generator.normal(size=shape).astype("float32")

    inputs = model.input
    if isinstance(inputs, dict):
        return {name: draw(name, tensor) for name, tensor in inputs.items()}
    return draw("images", inputs)


def targets_of(model):
    """Targets for a mean squared error, which any output takes."""
    generator = np.random.default_rng(1)

    def draw(tensor):
        shape = (BATCH, *(LENGTH if size is None else size for size in tensor.shape[1:]))
        return generator.normal(size=shape).astype("float32")

    return keras.tree.map_structure(draw, model.output)


def prompts_for(name, rows):
    """Prompts of three and four tokens, padded to the length that is to be written."""
    generator = np.random.default_rng(0)
    mask = (np.arange(LENGTH) < 3 + np.arange(rows)[:, None] % 2).astype("int32")
    tokens = generator.integers(1, VOCABULARY, (rows, LENGTH)).astype("int32") * mask
    if name != "t5":
        return {"token_ids": tokens, "padding_mask": mask}
    text = generator.integers(1, VOCABULARY, (rows, LENGTH)).astype("int32")
    return {
        "encoder_token_ids": text,
        "encoder_padding_mask": np.ones_like(text),
        "decoder_token_ids": tokens,
        "decoder_padding_mask": mask,
    }
