"""`ds nvme-tune`: finds the fastest options for reading and writing tensors on a drive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_cli.parsers import number, positive, size

if TYPE_CHECKING:
    from ds_nvme.space import Space
    from ds_nvme.trial import Tuned

_LOG_DIR = "_aio_bench_logs"


def register(app: typer.Typer, name: str = "nvme-tune") -> None:
    """Adds the tuner to `app` as the command `name`."""
    app.command(
        name,
        context_settings={
            "help_option_names": ["-h", "--help"],
            # The documented spelling has underscores; dashes are the same option.
            "token_normalize_func": lambda name: name.replace("-", "_"),
        },
    )(nvme_tune)


def nvme_tune(
    ctx: typer.Context,
    nvme_dir: Annotated[
        list[str],
        typer.Option(
            "--nvme_dir",
            metavar="DIR",
            help="A writable folder on the drive. Several times: one on each drive, measured together.",
        ),
    ],
    more_dirs: Annotated[
        list[str] | None,
        typer.Argument(metavar="DIRS", help="More folders: --nvme_dir A B is --nvme_dir A --nvme_dir B."),
    ] = None,
    sweep_config: Annotated[
        str,
        typer.Option("--sweep_config", metavar="FILE", help="JSON file with the values to try, a list an option."),
    ] = "",
    no_read: Annotated[bool, typer.Option("--no_read", help="Do not measure reading.")] = False,
    no_write: Annotated[bool, typer.Option("--no_write", help="Do not measure writing.")] = False,
    io_size: Annotated[
        int, typer.Option("--io_size", metavar="BYTES", parser=size, help="Size of the file on each drive, as in 400M.")
    ] = "400M",  # type: ignore[assignment]
    gpu: Annotated[bool, typer.Option("--gpu", help="Move tensors in GPU memory.")] = False,
    gds: Annotated[
        bool, typer.Option("--gds", help="Move them with GPUDirect Storage (gds_handle). Implies --gpu.")
    ] = False,
    flush_page_cache: Annotated[
        bool,
        typer.Option(
            "--flush_page_cache",
            help="Drop the page cache before each read: the files' pages, and as root everything. "
            "Reads go around it anyway where the filesystem allows that.",
        ),
    ] = False,
    log_dir: Annotated[
        str | None,
        typer.Option("--log_dir", metavar="DIR", help=f"Where sweep.csv and sweep.png go. Default: {_LOG_DIR}"),
    ] = None,
    loops: Annotated[
        int, typer.Option("--loops", metavar="N", parser=positive, help="Measurements of each finalist.")
    ] = "5",  # type: ignore[assignment]
    verbose: Annotated[bool, typer.Option("--verbose", help="Show every measurement.")] = False,
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="Try only this engine. Default: all that run here.")
    ] = "auto",
    budget: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", parser=number, help="How long the search may take.")
    ] = "60",  # type: ignore[assignment]
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find the fastest options of an aio_handle on a drive.

    Prints the best configuration as an `aio` section and as a line of Python. Progress goes to
    standard error; files on the drive have no names, nothing stays there however this ends. Dashes
    and underscores are the same in option names.

    Ctrl-C, SIGTERM and SIGHUP end the search: the best so far is printed, and 130, 143 or 129
    returned; a second signal ends it at once. A wrong option, folder or GPU returns 2, a drive that
    fails 1.
    """
    # Imported here: `ds --help` must not pay for them.
    import os

    from ds_cli.interrupts import Interrupts
    from ds_cli.tuning_view import make_view
    from ds_nvme import sweep
    from ds_nvme.errors import AccessError, MissingFileError, NvmeError, StoppedError
    from ds_nvme.page_cache import drop_everything
    from ds_nvme.places import Place
    from ds_nvme.tune import tune

    def fail(error: object, code: int) -> typer.Exit:
        typer.echo(f"{ctx.command_path}: {error}", err=True)
        return typer.Exit(code)

    folders = [*nvme_dir, *(more_dirs or ())]
    place = Place(gpu=gpu or gds, gds=gds)
    files: tuple[str, str] | None = None
    with Interrupts() as interrupts:
        try:
            if (reason := place.refusal()) is not None:
                raise fail(f"{'--gds' if gds else '--gpu'}: {reason}", 2)
            if gds and engine != "auto":
                raise fail(f"--gds moves by itself, without an engine of aio_handle: got --engine {engine}", 2)
            space = _space(sweep_config, engine)
            absent = sweep.missing()
            if absent and log_dir is not None:
                raise fail(f"--log_dir: {absent}", 2)
            if absent:
                typer.echo(f"no table and no picture: {absent}", err=True)
            else:
                os.makedirs(log_dir or _LOG_DIR, exist_ok=True)
                files = os.path.join(log_dir or _LOG_DIR, "sweep.csv"), os.path.join(log_dir or _LOG_DIR, "sweep.png")
            if flush_page_cache and (reason := drop_everything()) is not None:
                typer.echo(f"only the files' own pages are dropped: {reason}", err=True)
            with make_view(verbose=verbose) as view:
                tuned = tune(
                    folders,
                    space=space,
                    io_size=io_size,
                    loops=loops,
                    budget=budget,
                    read=not no_read,
                    write=not no_write,
                    place=place,
                    flush=flush_page_cache,
                    progress=view,
                    stop=interrupts,
                )
            combinations = len(place.candidates(space))
            found = _summary(tuned, combinations, folders, io_size, files)
            typer.echo(_as_json(found) if json else _as_text(tuned, found))
            if files is not None:
                sweep.table(tuned).to_csv(files[0], index=False)
                sweep.draw(tuned, files[1], f"{', '.join(folders)} ({place})")
        except StoppedError:
            raise fail("stopped before anything was measured", interrupts.exit_code) from None
        except (ValueError, MissingFileError, AccessError) as error:
            raise fail(error, 2) from None
        except (NvmeError, OSError) as error:
            raise fail(error, 1) from None
    if interrupts():
        raise typer.Exit(interrupts.exit_code)


def _space(sweep_config: str, engine: str) -> Space:
    from dataclasses import replace

    from ds_nvme.engines.choose import candidates, refusal
    from ds_nvme.space import Space

    try:
        space = Space.read(sweep_config) if sweep_config else Space()
    except OSError as error:
        raise ValueError(f"--sweep_config is a file that can be read: {error}") from None
    if engine != "auto":
        candidates(engine)  # a wrong name
        space = replace(space, engine=(engine,))
    for name in space.engine:
        if (reason := refusal(name)) is not None:
            raise ValueError(f"engine {name} can't run here: {reason}")
    return space


def _summary(
    tuned: Tuned, combinations: int, folders: list[str], io_size: int, files: tuple[str, str] | None
) -> dict[str, Any]:
    from statistics import median

    best = tuned.best
    return {
        **best.candidate.section(),
        "engine": best.candidate.engine,
        "python": best.candidate.python(),
        "read_gb_s": median(best.read) / 1e9 if best.read else None,
        "write_gb_s": median(best.write) / 1e9 if best.write else None,
        "spread": best.spread,
        "loops": best.loops,
        "finalists": 1 + len(tuned.rivals),
        "as_good": len(tuned.near),
        "confidence": tuned.confidence(),
        "measured": len(tuned.trials),
        "combinations": combinations,
        "seconds": round(tuned.seconds, 1),
        "complete": tuned.complete,
        "nvme_dir": folders,
        "io_size": io_size,
        "csv": files and files[0],
        "png": files and files[1],
    }


def _as_json(found: dict[str, Any]) -> str:
    import json

    return json.dumps(found, indent=2)


def _as_text(tuned: Tuned, found: dict[str, Any]) -> str:
    import json

    from ds_cli.tuning_view import rates

    lines = [
        f"Best performance (GB/sec): {rates(tuned.best)}",
        json.dumps({"aio": found["aio"]}, indent=4),
        found["python"],
        found["confidence"],
        f"measured {found['measured']} of {found['combinations']} combinations in {found['seconds']:.0f} s"
        + (f"; see {found['csv']} and {found['png']}" if found["csv"] else ""),
    ]
    return "\n".join(lines)
