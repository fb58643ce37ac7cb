"""What memory a model's states need under ZeRO-3: a table to read before renting the machines.

The formulas and the table are those of DeepSpeed's documentation (chapter "Memory Requirements"); see `estimate`.
"""

from __future__ import annotations

import itertools
import sys

from torch import nn

from ds_zero.estimate import MemoryEstimate, MemoryRow, check_at_least, count_params


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Memory that ZeRO-3 needs for a model's states: bytes of a node's host, of a GPU, and of the largest layer.

    With P parameters, L in the largest layer, g GPUs in a node, G in all, f = g / G:

                                 host of a node, with zero.Init; without                     GPU
        offload all to CPU       P * 18 * f * factor; P * max(4 * g, 18 * f) * factor        4 * L
        offload the optimizer    P * 16 * f * factor; P * max(4 * g, 16 * f) * factor        4 * L + 2 * P / G
        no offload               L * 4 * g * factor;  P * 4 * g * factor                     4 * L + 18 * P / G

    Args:
        total_params: parameters of the model; `2851e6` is fine.
        largest_layer_params: parameters of the largest module by itself.
        num_gpus_per_node: GPUs in a node. Default 1.
        num_nodes: nodes. Default 1.
        cpu_offload: optimizer states and gradients are on the host. Default True.
        cpu_offload_params: parameters are, too; needs `cpu_offload`. Default True.
        zero_init: the model is built inside `zero.Init`. Default True.
        additional_buffer_factor: factor on the host's memory, to be on the safe side. Default 1.5.

    Raises:
        ValueError: a number out of its range.
    """
    check_at_least("total_params", total_params, 0)
    check_at_least("largest_layer_params", largest_layer_params, 0)
    check_at_least("num_gpus_per_node", num_gpus_per_node, 1)
    check_at_least("num_nodes", num_nodes, 1)
    check_at_least("additional_buffer_factor", additional_buffer_factor, 0)
    gpus, layer = num_gpus_per_node * num_nodes, 4 * largest_layer_params
    build = 4 * num_gpus_per_node * total_params  # each process builds the model, in fp32
    if cpu_offload:
        kept = total_params * (18 if cpu_offload_params else 16) / num_nodes
        cpu_bytes = kept if zero_init else max(build, kept)
        gpu_bytes = layer if cpu_offload_params else layer + 2 * total_params / gpus
    else:
        cpu_bytes = layer * num_gpus_per_node if zero_init else build
        gpu_bytes = layer + 18 * total_params / gpus
    return int(cpu_bytes * additional_buffer_factor), int(gpu_bytes), int(layer)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    quiet: bool = False,
) -> MemoryEstimate:
    """Write and return a table of what ZeRO-3 needs under each way of offloading, for numbers of parameters.

    Args:
        total_params: parameters of the model; `2851e6` is fine.
        largest_layer_params: parameters of the largest module by itself.
        num_gpus_per_node: GPUs in a node. Default 1.
        num_nodes: nodes. Default 1.
        additional_buffer_factor: factor on the host's memory, to be on the safe side. Default 1.5.
        quiet: don't write the table to standard output. Default False.

    Raises:
        ValueError: a number out of its range.
    """
    rows = []
    for (params, states), zero_init in itertools.product([(True, True), (False, True), (False, False)], [True, False]):
        cpu_bytes, gpu_bytes, _ = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            states,
            params,
            zero_init,
            additional_buffer_factor,
        )
        places = [f"{name}={'cpu' if on else 'none':4}" for name, on in (("offload_param", params),)]
        places.append(f"offload_optimizer={'cpu' if states else 'none':4}")
        rows.append(MemoryRow(f"{', '.join(places)}, zero_init={int(zero_init)}", cpu_bytes, gpu_bytes))
    estimate = MemoryEstimate(
        int(total_params),
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
        tuple(rows),
        int(largest_layer_params),
    )
    if not quiet:
        sys.stdout.write(f"{estimate}\n")
    return estimate


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    quiet: bool = False,
) -> MemoryEstimate:
    """Write and return a table of what ZeRO-3 needs under each way of offloading, for a model.

    Parameters that share their memory are counted once. The model may be on the meta device.

    Args:
        model: the model.
        num_gpus_per_node: GPUs in a node. Default 1.
        num_nodes: nodes. Default 1.
        additional_buffer_factor: factor on the host's memory, to be on the safe side. Default 1.5.
        quiet: don't write the table to standard output. Default False.

    Raises:
        ValueError: a number out of its range.
    """
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return estimate_zero3_model_states_mem_needs_all_cold(
        count_params(model), largest, num_gpus_per_node, num_nodes, additional_buffer_factor, quiet=quiet
    )
