"""`ds io`: one transfer between memory and a drive, measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_cli.parsers import positive, size

if TYPE_CHECKING:
    from ds_nvme.gauge import Gauged


def register(app: typer.Typer, name: str = "io") -> None:
    """Adds the measurement to `app` as the command `name`."""
    app.command(
        name,
        context_settings={
            "help_option_names": ["-h", "--help"],
            # The documented spelling has underscores; dashes are the same option.
            "token_normalize_func": lambda name: name.replace("-", "_"),
        },
    )(io)


def io(
    ctx: typer.Context,
    read: Annotated[bool, typer.Option("--read", help="Measure reading.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Measure writing.")] = False,
    folder: Annotated[
        str | None, typer.Option("--folder", metavar="DIR", help="Use a file without a name here; it does not stay.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", metavar="FILE", help="Read this file, or write it new; it stays."),
    ] = None,
    io_size: Annotated[
        int | None,
        typer.Option(
            "--io_size", metavar="BYTES", parser=size, help="Bytes to move. Default: 400M, or all of --file to read."
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option("--block_size", metavar="BYTES", parser=size, help="Bytes of one request.")
    ] = "1M",  # type: ignore[assignment]
    queue_depth: Annotated[
        int, typer.Option("--queue_depth", metavar="N", parser=positive, help="Requests in flight, each thread.")
    ] = "128",  # type: ignore[assignment]
    intra_op_parallelism: Annotated[
        int, typer.Option("--intra_op_parallelism", "--threads", metavar="N", parser=positive, help="Threads.")
    ] = "1",  # type: ignore[assignment]
    single_submit: Annotated[bool, typer.Option("--single_submit", help="Submit requests one by one.")] = False,
    no_overlap_events: Annotated[
        bool, typer.Option("--no_overlap_events", help="Refill the queue only when all requests have ended.")
    ] = False,
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="Default: the first engine that runs here.")
    ] = "auto",
    loops: Annotated[int, typer.Option("--loops", metavar="N", parser=positive, help="How often.")] = "5",  # type: ignore[assignment]
    gpu: Annotated[bool, typer.Option("--gpu", help="Move a tensor in GPU memory.")] = False,
    gds: Annotated[
        bool, typer.Option("--gds", help="Move it with GPUDirect Storage (gds_handle). Implies --gpu.")
    ] = False,
    flush_page_cache: Annotated[
        bool,
        typer.Option(
            "--flush_page_cache",
            help="Drop the page cache before each read: the file's pages, and as root everything. "
            "Reads go around it anyway where the filesystem allows that.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure one transfer between memory and a file, several times.

    Goes around the page cache where the filesystem allows that, and says whether it did. What is
    measured is preceded by one write that is not. Dashes and underscores are the same in option
    names.

    Ctrl-C, SIGTERM and SIGHUP end it after the transfer that is running: what was measured is
    printed, and 130, 143 or 129 returned; a second signal ends it at once. A wrong option, file or
    GPU returns 2, a drive that fails 1.
    """
    # Imported here: `ds --help` must not pay for them.
    import errno

    from ds_cli.interrupts import Interrupts
    from ds_nvme.engines.choose import candidates
    from ds_nvme.errors import AccessError, EngineError, FileError, MissingFileError, NvmeError, StoppedError
    from ds_nvme.gauge import gauge
    from ds_nvme.options import Candidate
    from ds_nvme.page_cache import drop_everything
    from ds_nvme.places import Place

    def fail(error: object, code: int) -> typer.Exit:
        typer.echo(f"{ctx.command_path}: {error}", err=True)
        return typer.Exit(code)

    if read == write:
        raise fail(f"one of --read and --write must be given: {'both' if read else 'neither'} is", 2)
    if (folder is None) == (file is None):
        raise fail(f"one of --folder and --file must be given: {'neither' if folder is None else 'both'} is", 2)
    place = Place(gpu=gpu or gds, gds=gds)
    with Interrupts() as interrupts:
        try:
            if (reason := place.refusal()) is not None:
                raise fail(f"{'--gds' if gds else '--gpu'}: {reason}", 2)
            candidates(engine)  # a wrong name
            if flush_page_cache and (reason := drop_everything()) is not None:
                typer.echo(f"only the file's own pages are dropped: {reason}", err=True)
            candidate = Candidate(
                engine, block_size, queue_depth, single_submit, not no_overlap_events, intra_op_parallelism
            )
            done = gauge(
                candidate,
                write=write,
                folder=folder,
                file=file,
                io_size=io_size,
                loops=loops,
                place=place,
                flush=flush_page_cache,
                stop=interrupts,
            )
            found = {
                "operation": "write" if write else "read",
                "where": folder if folder is not None else file,
                "memory": str(place),
                **_summary(done, candidate),
            }
            typer.echo(_as_json(found) if json else _as_text(found))
        except StoppedError:
            raise fail("stopped before anything was measured", interrupts.exit_code) from None
        except (ValueError, MissingFileError, AccessError, EngineError) as error:
            raise fail(error, 2) from None
        except FileError as error:
            raise fail(error, 2 if error.errno in (errno.EEXIST, errno.ENODATA, errno.EINVAL) else 1) from None
        except (NvmeError, OSError) as error:
            raise fail(error, 1) from None
    if interrupts():
        raise typer.Exit(interrupts.exit_code)


def _summary(done: Gauged, candidate: Any) -> dict[str, Any]:
    return {
        "io_size": done.nbytes,
        "block_size": candidate.block_size,
        "queue_depth": candidate.queue_depth,
        "single_submit": candidate.single_submit,
        "overlap_events": candidate.overlap_events,
        "intra_op_parallelism": candidate.intra_op_parallelism,
        "engine": done.engine,
        "engine_path": done.path,
        "engine_why": done.why,
        "direct": done.direct,
        "loops": len(done.seconds),
        "seconds": list(done.seconds),
        "gb_s": done.rate / 1e9,
        "gb_s_min": min(done.rates) / 1e9,
        "gb_s_max": max(done.rates) / 1e9,
        "spread": done.spread,
        "processor_seconds_per_gib": done.processor_seconds_per_gib,
    }


def _as_json(found: dict[str, Any]) -> str:
    import json

    return json.dumps(found, indent=2)


def _as_text(found: dict[str, Any]) -> str:
    from ds_nvme.sizes import format_size

    rows = {
        found["operation"]: f"{found['gb_s']:.2f} GB/s (10^9 bytes), the median of {found['loops']} loops",
        "spread": f"{found['gb_s_min']:.2f} to {found['gb_s_max']:.2f} GB/s, {found['spread']:.0%} of the median",
        "processor": f"{found['processor_seconds_per_gib']:.3f} s for each GiB",
        "size": f"{format_size(found['io_size'])} of {found['memory']}, {found['where']}",
        "requests": f"{format_size(found['block_size'])}, {found['queue_depth']} in flight on each of "
        f"{found['intra_op_parallelism']} thread(s)"
        + (", one by one" if found["single_submit"] else "")
        + ("" if found["overlap_events"] else ", a batch at a time"),
        "engine": f"{found['engine']}: {found['engine_path']} ({found['engine_why']})",
        "page cache": "bypassed" if found["direct"] else "used: this filesystem can't be read around it",
    }
    return "\n".join(f"{name:<12}{value}" for name, value in rows.items())
