"""How many GPUs there are, and which of them CUDA_VISIBLE_DEVICES leaves. Never by way of torch."""

from __future__ import annotations

from ds_cli.launcher.errors import LaunchError


def count_gpus() -> int:
    """Number of NVIDIA GPUs in this machine, 0 if there is none or it cannot be known.

    NVML counts without creating a CUDA context, so nothing is left on the devices and nothing breaks
    a later fork. It does not look at CUDA_VISIBLE_DEVICES: `visible_devices` does.
    """
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        # Deliberately wide. No driver, a driver that does not match its library, a broken or missing
        # pynvml: all of them mean that no GPU can be counted, and CPU ranks can still be launched.
        return 0


def visible_devices(num_gpus: int, value: str | None) -> tuple[str, ...]:
    """The devices a process may use, as CUDA_VISIBLE_DEVICES names them.

    Args:
        num_gpus: number of GPUs in the machine.
        value: CUDA_VISIBLE_DEVICES, None if unset.

    Returns:
        Names in order: `("0", "1")`, or UUIDs if `value` has them. As in CUDA, an index that does not
        exist hides itself and all that follow. Empty if there is no GPU.

    Raises:
        LaunchError: `value` names a device twice.
    """
    if num_gpus == 0:
        return ()
    if value is None:
        return tuple(str(index) for index in range(num_gpus))
    names: list[str] = []
    for raw in value.split(","):
        name = raw.strip()
        if name.startswith(("GPU-", "MIG-")):
            pass
        elif name.isdecimal() and int(name) < num_gpus:
            name = str(int(name))
        else:
            break
        if name in names:
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES must name each device once; it is {value!r}. Remove the second {name!r}."
            )
        names.append(name)
    return tuple(names)
