"""The fetch plan: what is gathered together, from the shapes of a model alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_zero import (
    ZeroError,
    get_z3_leaf_modules,
    plan_units,
    register_external_parameter,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unregister_external_parameter,
    unset_z3_leaf_modules,
    z3_leaf_module,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Embedding, blocks and a head that is tied to the embedding; and a list of parameters."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width))])
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scales[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(**more: int) -> Model:
    with torch.device("meta"):
        return Model(**more)


def test_the_printed_plan() -> None:
    assert str(plan_units(model(), 10**9, persistence_threshold=10)) == (
        "unit 0: (model): 1 parameter, 8 elements, stays gathered\n"
        "unit 1: embed: 1 parameter, 80 elements\n"
        "unit 2: blocks.0: 6 parameters, 568 elements\n"
        "unit 3: blocks.1: 6 parameters, 568 elements\n"
        "unit 4: head: 0 parameters, 0 elements, with embed.weight"
    )


@pytest.mark.parametrize("limit", [1, 50, 300, 1000, 10**9])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_every_parameter_is_of_one_unit(limit: int, blocks: int) -> None:
    net = model(blocks=blocks)
    plan = plan_units(net, limit)
    assert sorted(plan.unit_of()) == sorted(name for name, _ in net.named_parameters())
    assert [unit.index for unit in plan.units] == list(range(len(plan.units)))
    assert plan.units[0].module == "" and len({unit.module for unit in plan.units}) == len(plan.units)
    modules = dict(net.named_modules())
    for unit in plan.units:
        direct = sum(p.numel() for p in modules[unit.module].parameters(recurse=False))
        assert unit.numel <= max(limit, direct + (8 if not unit.module else 0))


def test_a_model_without_a_stack_is_one_unit() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    (unit,) = plan_units(net, 40).units
    assert unit.module == "" and len(unit.parameters) == 4
    assert [unit.module for unit in plan_units(net, 39).units] == ["", "0", "2"]


def test_small_units_stay_gathered_up_to_a_total() -> None:
    plan = plan_units(model(), 10**9, persistence_threshold=100, max_persistent=50)
    assert [unit.module for unit in plan.units if unit.persistent] == [""]
    plan = plan_units(model(), 10**9, persistence_threshold=100)
    assert [unit.module for unit in plan.units if unit.persistent] == ["", "embed"]


def test_leaf_modules_are_units_whatever_their_size() -> None:
    net = model()
    assert set_z3_leaf_modules(net, [Model]) == [net] == get_z3_leaf_modules(net)
    (unit,) = plan_units(net, 10).units
    assert unit.numel == sum(p.numel() for p in net.parameters())
    assert unset_z3_leaf_modules(net, ["Model"]) == [net]
    assert not z3_leaf_module(net) and get_z3_leaf_modules(net) == []
    assert set_z3_leaf_modules(net, [f"{Block.__module__}.Block"]) == list(net.blocks)
    assert {"blocks.0", "blocks.1"} < {unit.module for unit in plan_units(net, 10).units}
    set_z3_leaf_module(net.blocks[0], False)
    assert "blocks.0" not in {unit.module for unit in plan_units(net, 10).units if unit.numel > 100}


def test_an_unknown_leaf_class_is_named() -> None:
    with pytest.raises(ValueError, match=r"has no 'Blok' \(did you mean 'Block'\?\)"):
        set_z3_leaf_modules(model(), ["Blok"])
    with pytest.raises(ValueError, match="has no 'Conv2d'"):
        set_z3_leaf_modules(model(), [nn.Conv2d])


def test_external_parameters_are_gathered_with_their_user() -> None:
    net = model()
    register_external_parameter(net.blocks[1].norm, net.embed.weight)
    register_external_parameter(net.blocks[1].norm, net.embed.weight)
    assert [unit.shared for unit in plan_units(net, 10**9).units if unit.module == "blocks.1"] == [("embed.weight",)]
    unregister_external_parameter(net.blocks[1].norm, net.embed.weight)
    assert not any(unit.shared for unit in plan_units(net, 10**9).units if unit.module == "blocks.1")
    with pytest.raises(ZeroError, match="was registered with the same module"):
        unregister_external_parameter(net.blocks[1].norm, net.embed.weight)
    with pytest.raises(ZeroError, match="got Tensor"):
        register_external_parameter(net, torch.ones(1))  # type: ignore[arg-type]


def test_a_unit_holds_something() -> None:
    with pytest.raises(ValueError, match="got a limit of 0"):
        plan_units(model(), 0)
