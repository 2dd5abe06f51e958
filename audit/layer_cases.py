"""How each layer of `keras.layers` is made and called by the audit."""

from collections.abc import Callable
from typing import Any

import torch
from cases import Case
from keras import layers

LAYER_CASES: list[Case] = []
# Layers that compute nothing with tensors on this backend, and why.
WITHOUT_TENSORS = {
    "FlaxLayer": "needs JAX",
    "HashedCrossing": "needs TensorFlow, hashes on the host",
    "Hashing": "needs TensorFlow, hashes on the host",
    "InputLayer": "says what comes in, computes nothing",
    "InputSpec": "describes inputs, is no layer",
    "IntegerLookup": "needs TensorFlow, looks up on the host",
    "JaxLayer": "needs JAX",
    "Layer": "the base class, computes nothing",
    "StringLookup": "strings are no tensors of torch",
    "TFSMLayer": "needs TensorFlow",
    "TextVectorization": "strings are no tensors of torch",
    "Wrapper": "the base class of wrappers, computes nothing",
}


def names_of_layers() -> dict[type, list[str]]:
    """Every class of `keras.layers` with all its names."""
    found: dict[type, list[str]] = {}
    for name in dir(layers):
        value = getattr(layers, name)
        if isinstance(value, type):
            found.setdefault(value, []).append(name)
    return found


def layer(
    name: str,
    *inputs: str,
    call: Callable[..., Any] = lambda layer, *x: layer(*x),
    has_gradient: bool = True,
    args: tuple = (),
    **options: Any,
) -> None:
    """A case of the layer of this name, made with these options anew each time."""

    def make() -> Any:
        given = [value() if callable(value) else value for value in args]
        return getattr(layers, name)(*given, **options)

    LAYER_CASES.append(Case(name, call, inputs, has_gradient, make))


def as_list(layer: Any, *x: torch.Tensor) -> Any:
    return layer(list(x))


def training(layer: Any, *x: torch.Tensor) -> Any:
    return layer(*x, training=True)


IMAGES = "u4,6,5,3"
SEQUENCES = "f4,5,6"

for _activation in ("gelu", "softmax"):
    layer("Activation", "f4,6", args=(_activation,))
layer("ActivityRegularization", "f4,6", l2=0.1)
for _name in ["ELU", "LeakyReLU", "ReLU", "Softmax", "Identity", "Flatten", "UnitNormalization"]:
    layer(_name, SEQUENCES)
layer("PReLU", SEQUENCES)
layer("PReLU", "f4,6,4", shared_axes=[1])
layer("Lambda", SEQUENCES, args=(lambda: lambda x: x * 2 + 1,))
layer("Masking", SEQUENCES)
layer("Permute", SEQUENCES, dims=(2, 1))
layer("RepeatVector", "f4,6", n=3)
layer("Reshape", "f4,6", target_shape=(2, 3))
layer("Reshape", SEQUENCES, target_shape=(6, 5))
layer("Rescaling", IMAGES, scale=2.0, offset=0.5)

layer("Dense", "f4,6", units=8, activation="relu")
layer("Dense", "f5,4,6", units=8)
layer("EinsumDense", SEQUENCES, equation="abc,cde->abde", output_shape=(None, 2, 4), bias_axes="de")
layer("Embedding", "i4,5", input_dim=6, output_dim=8)
layer("ReversibleEmbedding", "i4,5", input_dim=6, output_dim=8)
layer(
    "ReversibleEmbedding",
    "i4,5",
    "f4,5,8",
    input_dim=6,
    output_dim=8,
    call=lambda layer, ids, x: (layer(ids), layer(x, reverse=True)),
)

for _name in ["Add", "Average", "Maximum", "Minimum", "Multiply", "Subtract"]:
    layer(_name, SEQUENCES, SEQUENCES, call=as_list)
layer("Concatenate", SEQUENCES, SEQUENCES, call=as_list)
layer("Concatenate", SEQUENCES, SEQUENCES, call=as_list, axis=1)
layer("Dot", SEQUENCES, "f4,3,6", call=as_list, axes=2)

layer("Attention", SEQUENCES, "f4,3,6", call=as_list, use_scale=True)
layer("AdditiveAttention", SEQUENCES, "f4,3,6", call=as_list)
layer("MultiHeadAttention", SEQUENCES, "f4,3,6", num_heads=2, key_dim=4)
layer(
    "MultiHeadAttention",
    "f5,4,6",
    num_heads=2,
    key_dim=4,
    call=lambda layer, x: layer(x, x, use_causal_mask=True),
)
layer(
    "MultiHeadAttention",
    SEQUENCES,
    num_heads=2,
    key_dim=4,
    dropout=0.5,
    seed=3,
    call=lambda layer, x: layer(x, x, training=True),
)
layer(
    "GroupQueryAttention",
    SEQUENCES,
    head_dim=4,
    num_query_heads=4,
    num_key_value_heads=2,
    call=lambda layer, x: layer(x, x),
)

for _call in (training, lambda layer, x: layer(x, training=False)):
    layer("BatchNormalization", "f4,5,6", call=_call)
layer("BatchNormalization", "f5,4", call=training)
layer("LayerNormalization", SEQUENCES)
layer("LayerNormalization", "f5,4", axis=[0, 1])
layer("RMSNormalization", SEQUENCES)
layer("GroupNormalization", "f4,5,6", groups=2)
layer("Normalization", "f4,6", mean=[0.1] * 6, variance=[0.5] * 6)
# First without training: in mixed precision Keras on one device loses what a layer assigns.
layer("SpectralNormalization", "f4,6", args=(lambda: layers.Dense(8),))
layer("SpectralNormalization", "f4,6", args=(lambda: layers.Dense(8),), call=training)

for _rank, _sizes in ((1, "5"), (2, "6,5"), (3, "4,4,5")):
    _images = f"f4,{_sizes},4"
    for _kind in ("Average", "Max"):
        layer(f"{_kind}Pooling{_rank}D", _images, pool_size=2)
        layer(f"{_kind}Pooling{_rank}D", _images, pool_size=2, strides=1, padding="same")
        layer(f"Adaptive{_kind}Pooling{_rank}D", _images, output_size=2)
        layer(f"Global{_kind}Pooling{_rank}D", _images)
    layer(f"Conv{_rank}D", _images, filters=6, kernel_size=2)
    layer(f"Conv{_rank}D", _images, filters=6, kernel_size=3, strides=2, padding="same", groups=2)
    layer(f"Conv{_rank}DTranspose", _images, filters=6, kernel_size=2, strides=2)
    layer(f"Cropping{_rank}D", _images, cropping=1)
    layer(f"UpSampling{_rank}D", _images, size=2)
    layer(f"ZeroPadding{_rank}D", _images, padding=1)
    layer(f"SpatialDropout{_rank}D", _images, rate=0.5, seed=3, call=training)
    _frames = f"f2,3,{_sizes},2"
    layer(f"ConvLSTM{_rank}D", _frames, filters=4, kernel_size=2)
for _rank, _sizes in ((1, "5"), (2, "6,5")):
    layer(f"DepthwiseConv{_rank}D", f"f4,{_sizes},4", kernel_size=2, depth_multiplier=2)
    layer(f"SeparableConv{_rank}D", f"f4,{_sizes},4", filters=6, kernel_size=2)
layer("UpSampling2D", IMAGES, size=2, interpolation="bilinear")

for _name in ["SimpleRNN", "GRU", "LSTM"]:
    layer(_name, SEQUENCES, units=4)
    layer(_name, "f5,3,6", units=4, return_sequences=True, return_state=True, go_backwards=True)
layer("LSTM", SEQUENCES, units=4, dropout=0.5, recurrent_dropout=0.5, seed=3, call=training)
layer(
    "LSTM",
    SEQUENCES,
    "b4,5",
    units=4,
    call=lambda layer, x, mask: layer(x, mask=mask),
)
for _name, _states in (("SimpleRNNCell", 1), ("GRUCell", 1), ("LSTMCell", 2)):
    layer(
        _name,
        "f4,6",
        *["f4,8"] * _states,
        units=8,
        call=lambda layer, x, *states: layer(x, list(states)),
    )
layer("RNN", SEQUENCES, args=(lambda: layers.GRUCell(4),))
layer(
    "StackedRNNCells",
    "f4,6",
    "f4,4",
    "f4,8",
    args=(lambda: [layers.GRUCell(4), layers.SimpleRNNCell(8)],),
    call=lambda layer, x, *states: layer(x, list(states)),
)
layer("Bidirectional", SEQUENCES, args=(lambda: layers.LSTM(4, return_sequences=True),))
layer("TimeDistributed", SEQUENCES, args=(lambda: layers.Dense(8),))
layer("TorchModuleWrapper", "f4,6", args=(lambda: _module(),))
layer("Pipeline", IMAGES, args=(lambda: [layers.Rescaling(2.0), layers.CenterCrop(4, 4)],))


def _module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8))


for _name in ["AlphaDropout", "Dropout", "GaussianDropout"]:
    layer(_name, SEQUENCES, rate=0.5, seed=3, call=training)
layer("GaussianNoise", SEQUENCES, stddev=0.5, seed=3, call=training)

layer("CategoryEncoding", "i4,5", num_tokens=4, output_mode="count", has_gradient=False)
layer("Discretization", "f4,5", bin_boundaries=[-1.0, 0.0, 1.0], has_gradient=False)
layer("MelSpectrogram", "f4,64", fft_length=16, sequence_stride=8, num_mel_bins=6)
# Named windows need scipy.
layer(
    "STFTSpectrogram",
    "f4,32,1",
    mode="magnitude",
    frame_length=8,
    frame_step=4,
    fft_length=8,
    window=None,
)
layer("CenterCrop", IMAGES, height=4, width=3)
layer("CenterCrop", IMAGES, height=8, width=8)
layer("Resizing", IMAGES, height=4, width=7)
layer(
    "MaxNumBoundingBoxes",
    IMAGES,
    "u4,3,4",
    "i4,3",
    max_number=2,
    bounding_box_format="xyxy",
    has_gradient=False,
    call=lambda layer, images, boxes, labels: layer(
        {"images": images, "bounding_boxes": {"boxes": boxes, "labels": labels}}
    ),
)
for _name in ["AutoContrast", "Equalization"]:
    layer(_name, IMAGES, value_range=(0, 1), has_gradient=False)
layer(
    "ContrastLimitedAdaptiveHistogramEqualization",
    "u2,8,6,3",
    value_range=(0, 1),
    tile_grid_size=(2, 2),
    has_gradient=False,
)
for _name in ["MixUp", "CutMix"]:
    layer(
        _name,
        IMAGES,
        "o4,3",
        seed=3,
        has_gradient=False,
        call=lambda layer, images, labels: layer(
            {"images": images, "labels": labels}, training=True
        ),
    )
for _name, _options in {
    "AugMix": {},
    "RandAugment": {},
    "RandomBrightness": {"factor": 0.3},
    "RandomColorDegeneration": {"factor": 0.5},
    "RandomColorJitter": {
        "brightness_factor": 0.2,
        "contrast_factor": 0.2,
        "saturation_factor": 0.2,
        "hue_factor": 0.2,
    },
    "RandomContrast": {"factor": 0.3},
    "RandomElasticTransform": {},
    "RandomErasing": {},
    "RandomGrayscale": {"factor": 0.5},
    "RandomHue": {"factor": 0.5},
    "RandomInvert": {"factor": 0.5},
    "RandomPosterization": {"factor": 4},
    "RandomSaturation": {"factor": 0.5},
    "RandomSharpness": {"factor": 0.5},
    "Solarization": {"threshold_factor": 0.5},
    "RandomGaussianBlur": {"factor": 1.0},
}.items():
    _range = {} if _name == "RandomGrayscale" else {"value_range": (0, 1)}
    layer(_name, IMAGES, **_range, **_options, seed=3, call=training, has_gradient=False)
for _name, _options in {
    "RandomCrop": {"height": 4, "width": 3},
    "RandomFlip": {},
    "RandomPerspective": {"factor": 1.0, "scale": 0.3},
    "RandomRotation": {"factor": 0.2},
    "RandomShear": {"x_factor": 0.2, "y_factor": 0.2},
    "RandomTranslation": {"height_factor": 0.3, "width_factor": 0.3},
    "RandomZoom": {"height_factor": 0.3, "width_factor": 0.3},
}.items():
    layer(_name, IMAGES, **_options, seed=3, call=training, has_gradient=False)


def missing() -> list[str]:
    """Names of layers that have neither a case nor a reason for having none."""
    covered = {case.name for case in LAYER_CASES} | set(WITHOUT_TENSORS)
    return [names[0] for names in names_of_layers().values() if not covered & set(names)]
