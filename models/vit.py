"""CLIP's and SigLIP's vision towers: plain transformers over the patches of square images.

B images, S their side, L tokens of one (patches, with CLIP a class token before them), D width,
N heads, H head size, F MLP width, P values of a patch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from purestep.models.tower_rows import ItemAdapters, RowAdapters, add_adapters_, spread
from purestep.models.vision import Shapes, working_numbers
from purestep.state.errors import CheckpointError
from purestep.state.pytree import static, tree

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by transformers' names
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
}
TOWERS = ("clip_vision_model", "siglip_vision_model", "idefics3_vision", "smolvlm_vision")
UNREAD = (  # the layers above the one whose states are taken, and what pools them
    r"vision_tower\.(?:encoder\.layers\.\d+|post_layernorm|head)\..+"
    r"|vision_tower\.embeddings\.position_ids"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VitConfig:
    class_token: bool  # CLIP: a class token, a norm before the layers, no bias on the patches
    depth: int  # layers of the checkpoint
    taken: tuple[int, ...]  # the hidden states handed out, side by side; 0 is what the layers get
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    norm_eps: float
    activation: str

    @property
    def num_tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + self.class_token

    @property
    def num_layers(self) -> int:
        """Layers that are run."""
        return max(self.taken)


@tree
class Affine:
    """A linear, or a norm. Adapters know a linear by its children's names in a checkpoint."""

    weight_OD: Tensor
    bias_O: Tensor | None
    names: tuple[str, ...] = static(default=())


@tree
class VitLayer:
    norm1: Affine
    qkv: Affine  # q, k, v
    out: Affine
    norm2: Affine
    up: Affine
    down: Affine


@tree
class VitParams:
    class_D: Tensor | None
    patch: Affine  # [D, P]
    position_LD: Tensor
    norm: Affine | None
    layers: tuple[VitLayer, ...]


def vit_config(hf: PretrainedConfig, taken: int | list[int]) -> VitConfig:
    """The geometry of a tower of which the hidden states `taken` are wanted, counted as
    transformers does, from the end too. Raises CheckpointError for another kind of tower."""
    if hf.model_type not in TOWERS:
        raise CheckpointError(
            f"vision tower {hf.model_type!r} is not supported, only {', '.join(TOWERS)}"
        )
    states = hf.num_hidden_layers + 1
    chosen = [taken] if isinstance(taken, int) else taken
    if not chosen or any(not -states <= i < states for i in chosen):
        raise CheckpointError(
            f"vision_feature_layer={taken} must name some of the {states} hidden states"
        )
    if not isinstance(hf.image_size, int) or not isinstance(hf.patch_size, int):
        raise CheckpointError(
            f"image_size {hf.image_size} and patch_size {hf.patch_size} of the vision tower must "
            "be integers"
        )
    return VitConfig(
        class_token=hf.model_type == "clip_vision_model",
        depth=hf.num_hidden_layers,
        taken=tuple(i % states for i in chosen),
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_channels=hf.num_channels,
        image_size=hf.image_size,
        patch_size=hf.patch_size,
        norm_eps=hf.layer_norm_eps,
        activation=known_activation(hf.hidden_act),
    )


def known_activation(name: str) -> str:
    """The name itself. Raises CheckpointError for one that is not in ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"activation {name!r} of the vision tower is not supported, only "
            f"{', '.join(ACTIVATIONS)}"
        )
    return name


def vit_shapes(config: VitConfig) -> Shapes:
    D, p = config.hidden_size, config.patch_size
    shapes: Shapes = {
        "vision_tower.embeddings.patch_embedding.weight": (D, config.num_channels, p, p),
        "vision_tower.embeddings.position_embedding.weight": (config.num_tokens, D),
    }
    if config.class_token:
        shapes["vision_tower.embeddings.class_embedding"] = (D,)
        shapes |= affine_shapes("vision_tower.pre_layrnorm", D)
    else:
        shapes["vision_tower.embeddings.patch_embedding.bias"] = (D,)
    for i in range(config.num_layers):
        layer = f"vision_tower.encoder.layers.{i}"
        for name in ("layer_norm1", "layer_norm2"):
            shapes |= affine_shapes(f"{layer}.{name}", D)
        for name, size in _linears(config, i).items():
            shapes |= affine_shapes(name, *size)
    return shapes


def vit_spare(config: VitConfig) -> Shapes:
    """The linears of the layers above those that are run."""
    above = range(config.num_layers, config.depth)
    return {name: size for i in above for name, size in _linears(config, i).items()}


def _linears(config: VitConfig, i: int) -> Shapes:
    D, wide = config.hidden_size, config.intermediate_size
    sizes = {f"self_attn.{name}_proj": (D, D) for name in ("q", "k", "v", "out")}
    sizes |= {"mlp.fc1": (wide, D), "mlp.fc2": (D, wide)}
    return {f"vision_tower.encoder.layers.{i}.{name}": size for name, size in sizes.items()}


def affine_shapes(name: str, *size: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": size} | ({f"{name}.bias": size[:1]} if bias else {})


def vit_params(config: VitConfig, tensors: dict[str, Tensor]) -> VitParams:
    """Consumes the tower's tensors, so that no part of a stacked linear is held for longer."""

    def layer(i: int) -> VitLayer:
        root = f"vision_tower.encoder.layers.{i}"
        return VitLayer(
            norm1=affine_of(tensors, f"{root}.layer_norm1"),
            qkv=affine_of(tensors, *(f"{root}.self_attn.{x}_proj" for x in "qkv")),
            out=affine_of(tensors, f"{root}.self_attn.out_proj"),
            norm2=affine_of(tensors, f"{root}.layer_norm2"),
            up=affine_of(tensors, f"{root}.mlp.fc1"),
            down=affine_of(tensors, f"{root}.mlp.fc2"),
        )

    patch = affine_of(tensors, "vision_tower.embeddings.patch_embedding")
    return VitParams(
        class_D=tensors.pop("vision_tower.embeddings.class_embedding", None),
        patch=Affine(weight_OD=patch.weight_OD.flatten(1), bias_O=patch.bias_O),
        position_LD=tensors.pop("vision_tower.embeddings.position_embedding.weight"),
        norm=affine_of(tensors, "vision_tower.pre_layrnorm") if config.class_token else None,
        layers=tuple(layer(i) for i in range(config.num_layers)),
    )


def affine_of(tensors: dict[str, Tensor], *names: str) -> Affine:
    """The linears or norms of these names, stacked along the output."""
    weights = [tensors.pop(f"{name}.weight") for name in names]
    biases = [bias for name in names if (bias := tensors.pop(f"{name}.bias", None)) is not None]
    if len(names) == 1:
        return Affine(weight_OD=weights[0], bias_O=biases[0] if biases else None, names=names)
    bias_O = torch.cat(biases) if biases else None
    return Affine(weight_OD=torch.cat(weights), bias_O=bias_O, names=names)


def vit(
    params: VitParams, config: VitConfig, pixels_BCSS: Tensor, adapters: ItemAdapters | None = None
) -> Tensor:
    """The taken hidden states of every token: [B, L, D * how many are taken]. `adapters` are those
    of the B images."""
    own = spread(adapters, [config.num_tokens] * len(pixels_BCSS))
    g, p = config.image_size // config.patch_size, config.patch_size
    pixels = pixels_BCSS[:, :, : g * p, : g * p].unflatten(3, (g, p)).unflatten(2, (g, p))
    patches_BLP = pixels.permute(0, 2, 4, 1, 3, 5).reshape(len(pixels), g * g, -1)
    h_BLD = affine(patches_BLP, params.patch)
    if params.class_D is not None:
        h_BLD = torch.cat((params.class_D.expand(len(h_BLD), 1, -1), h_BLD), dim=1)
    h_BLD = h_BLD + params.position_LD
    if params.norm is not None:
        h_BLD = layer_norm(h_BLD, params.norm, config.norm_eps)
    taken = {0: h_BLD}
    for i, layer in enumerate(params.layers, 1):
        h_BLD = vit_layer(layer, config, h_BLD, own)
        if i in config.taken:
            taken[i] = h_BLD
    return torch.cat([taken[i] for i in config.taken], dim=-1)


def vit_layer(
    layer: VitLayer, config: VitConfig, h_BLD: Tensor, adapters: RowAdapters | None
) -> Tensor:
    x_BLD = layer_norm(h_BLD, layer.norm1, config.norm_eps)
    qkv = affine(x_BLD, layer.qkv, adapters).unflatten(-1, (3, config.num_heads, -1))
    q_BNLH, k_BNLH, v_BNLH = qkv.permute(2, 0, 3, 1, 4)
    o_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH)
    h_BLD = h_BLD + affine(o_BNLH.transpose(1, 2).flatten(2), layer.out, adapters)
    x_BLD = layer_norm(h_BLD, layer.norm2, config.norm_eps)
    x_BLF = ACTIVATIONS[config.activation](affine(x_BLD, layer.up, adapters))
    return h_BLD + affine(x_BLF, layer.down, adapters)


def affine(x: Tensor, w: Affine, adapters: RowAdapters | None = None) -> Tensor:
    """x W^T + bias, and of each row its own adapter's delta."""
    y = F.linear(x, w.weight_OD, w.bias_O)
    if adapters is not None:
        add_adapters_(y, x, w.names, adapters)
    return y


def layer_norm(x: Tensor, w: Affine, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w.weight_OD, w.bias_O, eps)


def vit_working(tower: VitConfig, num_images: int, num_rows: int, hidden_size: int) -> int:
    """Numbers that encoding square images of `num_rows` each holds at a time, but for layers'
    outputs that are taken."""
    tokens, rows = num_images * tower.num_tokens, num_images * num_rows
    return working_numbers(tokens, tower.hidden_size, tower.intermediate_size, rows, hidden_size)
