"""The command line `kvblend`. Nothing heavy is imported here: each command imports its own module."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.targets import AGENT_LISTEN, MATCHER_LISTEN, STORE_LISTEN

MODEL_FOLDER = Path("build/model/smollm2")

app = typer.Typer(
    help="Reuse the KV cache of any known text at any position of a prompt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Agent = Annotated[str, typer.Option(metavar="ADDRESS", help="The agent: host:port or unix:/path.")]
Store = Annotated[str, typer.Option(metavar="ADDRESS", help="The store.")]
Matcher = Annotated[str, typer.Option(metavar="ADDRESS", help="The matcher.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
Model = Annotated[Path, typer.Option(metavar="DIR", help="Folder of the model (`make demo` fetches it).")]


@app.command()
def up(
    name: Annotated[str, typer.Option(help="Name of this set of services; one of a name runs at a time.")] = "local",
    arena_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Shared memory for KV, such as 2GiB.")] = "2GiB",
    chunk_tokens: Annotated[int, typer.Option(help="Tokens in a chunk: a power of two, 16 to 1024.")] = 256,
    redis_url: Annotated[str, typer.Option(metavar="URL", help="Redis or Valkey behind the shared memory.")] = "",
    device: Annotated[str, typer.Option(help="Where engines' KV is: cpu (shared memory) or cuda.")] = "cpu",
    gpu: Annotated[str, typer.Option(metavar="UUID", help="cuda: of several GPUs the one to serve.")] = "",
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Has logs, matcher.db (what the matcher knows), and sockets such as agent.sock."
        ),
    ] = None,
    matcher_listen: Annotated[str, typer.Option(metavar="ADDRESS", help="host:port or unix:/path.")] = MATCHER_LISTEN,
    store_listen: Annotated[str, typer.Option(metavar="ADDRESS", help="host:port or unix:/path.")] = STORE_LISTEN,
    agent_listen: Annotated[str, typer.Option(metavar="ADDRESS", help="host:port or unix:/path.")] = AGENT_LISTEN,
) -> None:
    """Start a matcher, a store and an agent; Ctrl-C stops them.

    Engines on this host should connect to the agent's unix socket, which is shown when all is ready: their calls take
    less time than over TCP. Each service has one in --run-dir beside the address it is given, unless that is one.
    """
    from cli.up import UpOptions, run

    listen = {"matcher": matcher_listen, "store": store_listen, "agent": agent_listen}
    raise typer.Exit(run(UpOptions(name, arena_bytes, chunk_tokens, redis_url, run_dir, listen, device, gpu)))


@app.command()
def demo(
    docs: Annotated[Path | None, typer.Option(metavar="PATH", help="Your own folder of text files.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the report goes.")] = Path("build/demo"),
    prompts: Annotated[int, typer.Option(min=1, help="Prompts with the documents in a new order.")] = 6,
    recompute: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="FRACTION", help="Share of reused tokens to recompute.")
    ] = 0.15,
    model: Model = MODEL_FOLDER,
    agent: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Use this agent instead of starting services.")
    ] = None,
) -> None:
    """Answer prompts by full prefill and through kvblend; compare."""
    from cli.demo.command import run

    raise typer.Exit(run(docs, out, prompts, recompute, model, agent))


@app.command()
def explain(
    file: Annotated[Path, typer.Argument(help='A prompt: text, or JSON {"documents": [...], "question": ...}.')],
    agent: Agent = AGENT_LISTEN,
    model: Model = MODEL_FOLDER,
    instance: Annotated[str, typer.Option(metavar="ID", help="Whose answer, where an agent serves several.")] = "",
    as_json: Json = False,
) -> None:
    """Show where each token's KV would come from, and why not more."""
    from cli.explain import run

    raise typer.Exit(run(file, agent, model, as_json, instance))


@app.command()
def status(
    agent: Agent = AGENT_LISTEN,
    store: Store = STORE_LISTEN,
    matcher: Matcher = MATCHER_LISTEN,
    once: Annotated[bool, typer.Option("--once", help="Print once instead of live.")] = False,
    as_json: Json = False,
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Seconds between two looks.")] = 1.0,
) -> None:
    """Live table: spaces, tiers, hit rates, leases, latencies."""
    from cli.status import run

    targets = {"matcher": matcher, "store": store, "agent": agent}
    raise typer.Exit(run(targets, once=once, as_json=as_json, every=every))


@app.command()
def ping(
    agent: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Ask this agent.")] = None,
    store: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Ask this store.")] = None,
    matcher: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Ask this matcher.")] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No output, the exit code only.")] = False,
    timeout: Annotated[float, typer.Option(min=0.05, metavar="SECONDS", help="Longest wait for each.")] = 2.0,
) -> None:
    """Are the services ready? Exit code 0 if so.

    Without addresses: those of `kvblend up`.
    """
    from cli.ping import run

    given = {"matcher": matcher, "store": store, "agent": agent}
    targets = {service: target for service, target in given.items() if target}
    defaults = {"matcher": MATCHER_LISTEN, "store": STORE_LISTEN, "agent": AGENT_LISTEN}
    raise typer.Exit(run(targets or defaults, as_json=as_json, quiet=quiet, timeout=timeout))


@app.command()
def check(
    store: Store = STORE_LISTEN,
    arena: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Check a stopped store instead, in its arena's directory.")
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Repair what disagrees.")] = False,
    as_json: Json = False,
    timeout: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Longest time for all of it.")] = 600.0,
    token: Annotated[
        str, typer.Option(envvar="KVBLEND_TOKEN", help="A bearer token for --fix, where the store knows tokens.")
    ] = "",
) -> None:
    """Do the store's headers, bytes, matchers and Redis agree? Exit code 0 if so."""
    from cli.check import run

    raise typer.Exit(run(store, arena, fix=fix, as_json=as_json, timeout=timeout, token=token))


@app.command()
def doctor(
    redis_url: Annotated[
        str, typer.Option(metavar="URL", envvar="KVBLEND_STORE_REDIS_URL", help="A Redis or Valkey to try.")
    ] = "",
    model: Model = MODEL_FOLDER,
    as_json: Json = False,
) -> None:
    """What this machine lacks, and how to get it."""
    from cli.doctor import run

    raise typer.Exit(run(redis_url=redis_url, model=model, as_json=as_json))


bench = typer.Typer(help="Questions about a workload that need no running service.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.callback()
def _bench() -> None:
    """Questions about a workload that need no running service."""


@bench.command()
def eviction(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="JSON lines: timestamp (ms), hash_ids.")],
    sizes: Annotated[str, typer.Option(metavar="PERCENT,...", help="Of the trace's different blocks.")] = "1,5,10,25",
    policy: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Again for more; all by default.")] = None,
    as_json: Json = False,
) -> None:
    """Replay request traces through the store's eviction policies."""
    from cli.bench.eviction import run

    raise typer.Exit(run(traces, sizes, policy or [], as_json))


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
