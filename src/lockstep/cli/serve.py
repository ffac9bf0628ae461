"""`lockstep serve`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.words import Add, number, say

if TYPE_CHECKING:
    from lockstep.serve.server import Server
    from lockstep.service.http.settings import AccessTokens, Limits
    from lockstep.service.journal import Journal


def _serve(options: argparse.Namespace) -> int | None:
    from lockstep.service.http import require_serve_extra

    require_serve_extra()
    from lockstep.cluster.devices import cpu_only
    from lockstep.errors import ConfigError
    from lockstep.serve.devices import replica_environments
    from lockstep.serve.server import Server, check_ways
    from lockstep.serve.spec import ServeSpec
    from lockstep.service.http.guard import check_host
    from lockstep.service.http.server import bind
    from lockstep.service.http.settings import AccessTokens, read_tokens
    from lockstep.service.journal import Journal

    # What can be wrong without a model is found before one is loaded.
    tokens = AccessTokens() if options.token_file is None else read_tokens(Path(options.token_file))
    check_host(options.host, tokens)
    cpu_only()  # accelerators are the replicas'
    environments: list[dict[str, str]] = [{}] * options.replicas
    if options.devices_per_replica is not None:
        if not options.recipe and options.devices_per_replica > 1:
            raise ConfigError(
                f"--devices-per-replica {options.devices_per_replica}: a model by itself runs on one device; serve a "
                "recipe, whose [cluster] says how its rollout role is laid out"
            )
        environments = replica_environments(options.replicas, options.devices_per_replica, os.environ)
    transport_dir = None if options.transport_dir is None else Path(options.transport_dir)
    check_ways(options.transport, transport_dir, options.sync_host)
    weights_dir = None if options.weights_dir is None else Path(options.weights_dir)
    if weights_dir is not None and not weights_dir.is_dir():
        raise ConfigError(f"--weights-dir {weights_dir} is not a folder")
    sizes = {key: getattr(options, key) for key in ("dtype", "numerics", "slots", "max_positions", "kv_memory_mib")}
    sizes = {key: value for key, value in sizes.items() if value is not None}
    if options.recipe and sizes:
        raise ConfigError(
            f"--{next(iter(sizes)).replace('_', '-')} goes with a model; a recipe says it itself: edit it"
        )
    spec = ServeSpec(model=options.model or "", recipe=options.recipe or "", warm_up=options.warm_up, **sizes)
    with contextlib.ExitStack() as at_the_end:
        listener = bind(options.host, options.port)
        at_the_end.callback(listener.close)
        journal = None if options.journal is None else Journal(Path(options.journal), fsync=options.fsync, say=say)
        if journal is not None:
            at_the_end.callback(journal.close)
            if journal.recovered:
                say(f"journal {journal.path}: {journal.recovered} requests were under way when its last server stopped")
        server = Server(
            spec,
            ledger=journal,
            replicas=options.replicas,
            update=options.policy,
            flips=options.flips,
            max_waiting=options.max_waiting,
            boot_s=options.boot_deadline,
            weights_dir=weights_dir,
            sync_token=tokens.sync,
            sync_host=options.sync_host,
            transport=options.transport,
            transport_dir=transport_dir,
            offers_from=options.offers_from,
            environments=lambda number: environments[number],
            say=say,
        )
        return _run(options, server, tokens, listener, weights_dir, journal)


def _limits(options: argparse.Namespace, max_positions: int) -> Limits:
    """What was given, else the defaults; a prompt can be no longer than the context in any case."""
    from lockstep.errors import ConfigError
    from lockstep.service.http.settings import Limits

    if options.max_prompt_tokens is not None and options.max_prompt_tokens > max_positions:
        raise ConfigError(
            f"--max-prompt-tokens {options.max_prompt_tokens} is more than the {max_positions} positions of a sample; "
            "lower it, or raise --max-positions"
        )
    given = {
        "prompt_tokens": options.max_prompt_tokens,
        "concurrent": options.max_concurrency,
        "queue_s": options.queue_s,
    }
    limits = Limits(**{name: value for name, value in given.items() if value is not None})
    return replace(limits, prompt_tokens=min(limits.prompt_tokens, max_positions))


def _run(
    options: argparse.Namespace,
    server: Server,
    tokens: AccessTokens,
    listener: Any,
    weights_dir: Path | None,
    journal: Journal | None,
) -> int | None:
    """Serve until told to stop; says what was in flight then."""
    import asyncio
    from importlib.metadata import version

    from lockstep.service.http.replay import MemoryReplay
    from lockstep.service.http.server import HttpServer
    from lockstep.service.http.settings import Served
    from lockstep.service.http.surface import Surface

    model, limits = server.served.model, _limits(options, server.served.max_positions)
    config = server.served.config
    name = options.name or Path(options.model if config is None else config.model.name).name
    served = Served(name, model.tokenizer, model.spec.vocab_size, server.served.max_positions, weights_dir=weights_dir)
    surface = Surface(server.service, server, served, limits, tokens, options.host, journal or MemoryReplay())
    http = HttpServer(surface, listener, options.grace_s, version("lockstep-rl"))

    def on_ready() -> None:
        print(f"listening on {http.url}")
        print(
            f"model {name}, policy {server.policy}, {options.replicas} replica(s), new versions: {options.policy}\n"
            f"limits: {served.max_positions} positions, {limits.prompt_tokens} prompt tokens, {limits.concurrent} "
            f"calls at a time, {options.max_waiting} waiting samples, {limits.queue_s:g} s in the queue\n"
            f"tokens: {'needed' if tokens else 'none, this machine only'}",
            flush=True,
        )

    try:
        report = asyncio.run(http.serve(on_ready))
    finally:
        if http.forced:  # at once: threads that wait for replicas are not waited for
            print("stopped at once; what was in flight is lost", file=sys.stderr, flush=True)
            os._exit(130)
        server.close(0.0)
    count = sum(map(len, report.values()))
    ends = ", ".join(f"{len(ids)} {outcome}" for outcome, ids in report.items() if ids)
    print(f"closed: {count} requests were in flight{': ' + ends if ends else ''}")
    return None


def add_serve(add: Add) -> None:
    serve = add(
        "serve", _serve, "serve rollouts over HTTP: OpenAI-compatible, and token-in token-out for training",
        epilog="The first line printed is `listening on URL`. SIGTERM finishes what is in flight; again: at once.",
    )  # fmt: skip
    count = number(int, 1, "a whole number >= 1")
    seconds = number(float, 0, "a number of seconds >= 0")
    serve.add_argument(
        "model", metavar="MODEL", nargs="?", help="a known name, a folder in Hugging Face layout, or a .gguf file"
    )
    serve.add_argument("--recipe", metavar="FILE", help="serve the rollout role of a recipe instead of a model")
    serve.add_argument("--name", metavar="NAME", help="of the model, for clients (default: that of the model's folder)")
    serve.add_argument("--host", metavar="HOST", default="127.0.0.1", help="any but this machine needs --token-file")
    port = number(int, 0, "a port")
    patience = number(float, 0.001, "a number of seconds > 0")
    serve.add_argument("--port", metavar="N", type=port, default=8000, help="0: any that is free (default: 8000)")
    serve.add_argument(
        "--token-file", metavar="FILE",
        help="secrets, readable by you alone: lines `inference TOKEN`, `control TOKEN`, `sync TOKEN`; or JSON, or TOML",
    )  # fmt: skip
    serve.add_argument("--replicas", metavar="N", type=count, default=1, help="processes that sample (default: 1)")
    serve.add_argument(
        "--devices-per-replica", metavar="N", type=count,
        help="accelerators for each replica, its own (default: all see all)",
    )  # fmt: skip
    serve.add_argument(
        "--policy", choices=("drain", "abort", "dual"), default="drain",
        help="when a version comes, requests under way: finish first, start anew, or finish beside it (default: drain)",
    )  # fmt: skip
    serve.add_argument(
        "--flips", choices=("rolling", "together"), default="rolling",
        help="replicas take a version over one after the other, or prepare all at once (default: rolling)",
    )  # fmt: skip
    serve.add_argument(
        "--journal", metavar="FILE",
        help="what was admitted and how it ended, and the answers to idempotency keys: kept across a crash",
    )  # fmt: skip
    serve.add_argument("--fsync", action="store_true", help="wait for the disk with every line of the journal")
    serve.add_argument("--weights-dir", metavar="DIR", help="the only folder that versions may be staged from")
    serve.add_argument(
        "--offers-from", metavar="HOST", action="append", default=[],
        help="an address, network or name that versions offered by other processes may be pulled from, besides this "
        "machine; may be repeated",
    )  # fmt: skip
    serve.add_argument(
        "--transport", choices=("shared_memory", "transfer", "files"), default="shared_memory",
        help="which way weights go to the replicas, from here and from trainers: on this machine, over the network, by "
        "a folder (default: shared_memory)",
    )  # fmt: skip
    serve.add_argument("--transport-dir", metavar="DIR", help="files: the folder, which trainers see at the same path")
    serve.add_argument(
        "--sync-host", metavar="HOST", default="127.0.0.1",
        help="this machine's address where trainers' weight syncs are taken (default: 127.0.0.1)",
    )  # fmt: skip
    serve.add_argument(
        "--boot-deadline", metavar="S", type=patience, default=300.0,
        help="for a replica to load its model; one that takes longer is ended (default: 300)",
    )  # fmt: skip
    serve.add_argument("--max-prompt-tokens", metavar="N", type=count, help="of one prompt")
    serve.add_argument(
        "--max-concurrency", metavar="N", type=count, help="calls under way; more are told to come again"
    )
    serve.add_argument(
        "--max-waiting", metavar="N", type=count, default=4096, help="samples that wait for a replica (default: 4096)"
    )
    serve.add_argument(
        "--queue-s", metavar="S", type=seconds, help="an OpenAI request may wait so long for a replica (default: 120)"
    )
    serve.add_argument(
        "--grace-s", metavar="S", type=seconds, default=30.0, help="to finish what is in flight (default: 30)"
    )
    serve.add_argument("--slots", metavar="N", type=count, help="samples decoded together (default: 32)")
    serve.add_argument("--max-positions", metavar="N", type=count, help="prompt and completion tokens of one sample")
    serve.add_argument(
        "--kv-memory-mib", metavar="N", type=count, help="for cache pages (default: enough for all slots)"
    )
    serve.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32")
    serve.add_argument("--numerics", choices=("exact", "fast"), help="default: exact")
    serve.add_argument("--warm-up", action="store_true", help="compile before the first request")
