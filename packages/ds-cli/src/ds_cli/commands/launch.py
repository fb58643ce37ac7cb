"""`ds launch`: starts a script as the ranks of one job on this machine."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ds_cli.parsers import number, whole_number


def register(app: typer.Typer, name: str = "launch") -> None:
    """Adds the launcher to `app` as the command `name`."""
    app.command(
        name,
        context_settings={
            "help_option_names": ["-h", "--help"],
            # Our options end at the script: what follows it is the script's, even where it looks like ours.
            "allow_interspersed_args": False,
            # The documented spelling has underscores; dashes are the same option.
            "token_normalize_func": lambda name: name.replace("-", "_"),
        },
    )(launch)


def launch(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="What to run: see --module and --no_python.")],
    script_args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Passed to the script untouched.")
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(
            "--num_gpus",
            "--num_accelerators",
            metavar="N",
            parser=whole_number,
            help="Number of ranks. Default: one for each visible GPU; 1 on a machine without GPUs.",
        ),
    ] = None,
    num_nodes: Annotated[
        int,
        typer.Option("--num_nodes", metavar="N", parser=whole_number, help="Number of machines. Only 1 so far."),
    ] = 1,
    include: Annotated[
        str, typer.Option("--include", metavar="HOST:SLOTS", help="Use only these GPUs, as in localhost:0,1.")
    ] = "",
    exclude: Annotated[
        str,
        typer.Option("--exclude", metavar="HOST:SLOTS", help="Use all GPUs but these, as in localhost:0."),
    ] = "",
    master_addr: Annotated[
        str, typer.Option("--master_addr", metavar="ADDR", help="Where the ranks meet.")
    ] = "127.0.0.1",
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master_port",
            parser=whole_number,
            metavar="PORT",
            help="Port of rank 0. Default: 29500, or a free one if that is taken.",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", help="SCRIPT is a module: run it as python -m SCRIPT.")] = False,
    no_python: Annotated[bool, typer.Option("--no_python", help="SCRIPT is an executable: run it as it is.")] = False,
    no_local_rank: Annotated[
        bool, typer.Option("--no_local_rank", help="Do not pass --local_rank=N to the script.")
    ] = False,
    bind_cores_to_rank: Annotated[
        bool, typer.Option("--bind_cores_to_rank", help="Give each rank CPU cores of its own.")
    ] = False,
    bind_core_list: Annotated[
        str,
        typer.Option(
            "--bind_core_list",
            metavar="LIST",
            help="The cores to divide among the ranks, as in 0-3,8,10-11. Implies --bind_cores_to_rank.",
        ),
    ] = "",
    log_dir: Annotated[
        str,
        typer.Option(
            "--log_dir",
            metavar="DIR",
            help="Also append each rank's output to DIR/rank_N.out and DIR/rank_N.err.",
        ),
    ] = "",
    grace_s: Annotated[
        float,
        typer.Option(
            "--grace_s",
            metavar="S",
            parser=number,
            help="Seconds between asking ranks to stop and killing them.",
        ),
    ] = 5.0,
    dry_run: Annotated[bool, typer.Option("--dry_run", help="Show the plan and start nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Show the plan as JSON. Implies --dry_run.")] = False,
) -> None:
    """Start SCRIPT as the ranks of one job on this machine.

    Options go before SCRIPT; everything after it belongs to the script. Dashes and underscores are
    the same in option names.

    When a rank fails the others are stopped and its exit code is returned (128+n if signal n killed
    it). Ctrl-C stops all ranks and returns 130, SIGTERM 143; a second Ctrl-C kills at once. A wrong
    option returns 2.
    """
    # Imported here: `ds --help` must not pay for them.
    from ds_cli.launcher.errors import LaunchError
    from ds_cli.launcher.machine import Machine
    from ds_cli.launcher.options import LaunchOptions
    from ds_cli.launcher.plan import LaunchPlan
    from ds_cli.launcher.supervisor import Supervisor

    try:
        options = LaunchOptions(
            script=script,
            script_args=tuple(script_args or ()),
            num_gpus=num_gpus,
            num_nodes=num_nodes,
            include=include,
            exclude=exclude,
            master_addr=master_addr,
            master_port=master_port,
            module=module,
            no_python=no_python,
            no_local_rank=no_local_rank,
            bind_cores_to_rank=bind_cores_to_rank,
            bind_core_list=bind_core_list,
            log_dir=log_dir,
            grace_s=grace_s,
        )
        plan = LaunchPlan.build(options, Machine.detect(), os.environ)
        if dry_run or json:
            typer.echo(plan.to_json() if json else plan.to_text())
            return
        sys.stdout.flush()
        raise typer.Exit(Supervisor(plan, name=ctx.command_path).run())
    except LaunchError as error:
        typer.echo(f"{ctx.command_path}: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        # Before the supervisor took the signals over, or after it gave them back: no rank is alive.
        raise typer.Exit(130) from None
