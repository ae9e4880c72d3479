"""The linears of a tower and its projector that adapters may touch."""

import torch
import torch.utils._pytree as pytree

from purestep.models.config import SPARE, TOWER, FusedLinear
from purestep.models.tower_rows import tower_name
from purestep.models.vision import VisionFamily
from purestep.models.vit import Affine


def tower_linears(family: VisionFamily, geometry: object) -> tuple[FusedLinear, ...]:
    """Each linear that the family's functions multiply by, with its children stacked as they stack
    them; then those that a checkpoint has and no function reads, which adapters may touch without
    effect."""
    shapes = family.shapes(geometry)
    blank = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    parts = pytree.tree_leaves(
        family.load_params(geometry, blank), is_leaf=lambda part: isinstance(part, Affine)
    )
    matrices = [p for p in parts if isinstance(p, Affine) and p.names and p.weight_OD.dim() == 2]
    run = [(TOWER, part.names, [shapes[f"{n}.weight"] for n in part.names]) for part in matrices]
    spare = [(SPARE, (name,), [shape]) for name, shape in family.spare(geometry).items()]
    return tuple(
        FusedLinear(
            name=tower_name(names),
            parent=parent,
            children=tuple(names),
            in_features=sizes[0][1],
            out_sizes=tuple(size[0] for size in sizes),
        )
        for parent, names, sizes in (*run, *spare)
    )
