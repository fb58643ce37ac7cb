"""Trains a byte-level GPT on the source of Python's standard library with the ds-stack engine.

    deepspeed --num_accelerators 2 train.py --zero 2

`make train` in the root of the repository does the same, installation included.
"""

from __future__ import annotations

import time

import data
import psutil
import torch
import torch.distributed as dist
from history import History
from model import GPT
from options import parse_options, read_config
from plot import plot
from view import open_view

import ds_engine


def main() -> None:
    options = parse_options()
    config = read_config(options)
    torch.manual_seed(options.seed)  # the same first weights on every rank
    model = GPT(options.width, options.layers, options.heads, options.context)
    size = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = ds_engine.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank, world_size, device = engine.global_rank, engine.world_size, engine.device

    corpus = data.load(max_bytes=options.max_bytes)
    batch, context = config["train_micro_batch_size_per_gpu"], options.context
    accumulation = config["gradient_accumulation_steps"]
    tokens_per_step = batch * context * accumulation * world_size
    history = History(options.out.name, {"config": config, "device": device.type, "ranks": world_size})
    title = f"{size / 1e6:.1f}M parameters, ZeRO-{options.zero}, {world_size} x {device.type}"
    begin = time.perf_counter()

    with open_view(history, options.steps, title, rank) as view:
        while engine.global_steps < options.steps:
            step_begin = time.perf_counter()
            losses = []
            first = engine.global_steps * accumulation
            for micro_step in range(first, first + accumulation):
                x, y = data.sample(corpus.train, batch, context, micro_step, rank, options.seed)
                loss = engine(x.to(device), y.to(device))
                engine.backward(loss)
                engine.step()  # updates the weights at the last micro-batch; before, it only counts
                losses.append(loss.detach())
            step_loss = mean_over_ranks(losses)
            step, now = engine.global_steps, time.perf_counter()
            at = {"step": step, "seconds": now - begin, "tokens": step * tokens_per_step}
            history.steps.append(
                {
                    **at,
                    "loss": step_loss,
                    "lr": engine.get_lr()[0],
                    "grad_norm": float(engine.get_global_grad_norm() or 0.0),
                    "tokens_per_s": tokens_per_step / (now - step_begin),
                    "memory_bytes": memory_bytes(device),
                }
            )
            if step == 1 or step == options.steps or step % options.evaluate_every == 0:
                share = data.held_out_batches(
                    corpus.held_out, batch, context, options.held_out_batches, rank, world_size
                )
                history.held_out.append({**at, "loss": evaluate(engine, share)})
            if view:
                view.refresh()

    # Every rank writes along, and the same text: none is left waiting for the others.
    engine.eval()
    prompt = torch.tensor(list(options.prompt.encode()), device=device)
    written = model.generate(prompt, options.sample_bytes, options.temperature, options.seed)
    history.sample = data.decode(written)
    if rank == 0:
        history.save(options.out / "history.json")
        plot([history], options.out / "loss.png")
        first_loss, last_loss = (history.held_out[at]["loss"] for at in (0, -1))
        print(f"\nWhat it writes after {options.prompt!r}:\n\n{history.sample}\n")
        print(f"held-out loss: {first_loss:.3f} -> {last_loss:.3f} nats a byte")
        print(f"history: {options.out / 'history.json'}")
        print(f"curves: {options.out / 'loss.png'}", flush=True)
    engine.destroy()


@torch.no_grad()
def evaluate(engine: ds_engine.Engine, batches: data.Batches) -> float:
    """The mean loss over this rank's share of the held-out text, then over the ranks."""
    engine.eval()
    losses = [engine(x.to(engine.device), y.to(engine.device)) for x, y in batches]
    engine.train()
    return mean_over_ranks(losses)


def mean_over_ranks(losses: list[torch.Tensor]) -> float:
    """One number of every rank's losses: the mean of all of them."""
    mean = torch.stack(losses).float().mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def memory_bytes(device: torch.device) -> int:
    """The most an accelerator has held for this rank; on CPU, what the process holds now."""
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    return torch.accelerator.max_memory_allocated(device)


if __name__ == "__main__":
    main()
