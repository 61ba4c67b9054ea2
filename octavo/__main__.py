"""The `octavo` command: up, chat, stats, explain, audit, reset, key, model fetch, demo.

This module only reads the command line; each verb is a module of `octavo.commands`, imported when it is used, so that
`octavo --help` does not wait for any library.
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version

from octavo.commands import defaults

MAX_WORKERS = 64
"""On one machine."""
INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells have it."""


def main() -> None:
    """Run the verb on the command line. Exits 0, or 1 with one line on standard error that says what went wrong."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it says beside our one line says nothing more
    try:
        options = _parser().parse_args()
        run: Callable[[argparse.Namespace], None] = options.run
        run(options)
    except KeyboardInterrupt:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(INTERRUPTED)  # the interpreter's own end would wait for gRPC's threads, whatever they are amid
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        from octavo.commands.problems import explained

        if (problem := explained(error)) is None:
            raise
        print(f"octavo: {problem}", file=sys.stderr)
        sys.exit(1)


# ---- the verbs -----------------------------------------------------------------------------------------------


def _up(options: argparse.Namespace) -> None:
    import asyncio

    from deploy.local import Ports
    from octavo.commands.console import CommandFailed
    from octavo.commands.model import fetch_model, models_dir
    from octavo.commands.up import checked_cluster, up
    from octavo.models import find

    models = [model.strip() for model in options.model.split(",")]
    if len(models) > options.workers:
        raise CommandFailed(f"--model names {len(models)} models, --workers {options.workers} can serve one each")
    env = {
        "OCTAVO_MODEL": options.model,
        "OCTAVO_KV_MEMORY": options.kv_memory,
        "OCTAVO_DTYPE": options.dtype,
        "OCTAVO_THREADS": options.threads and str(options.threads),
    }
    given = {name: value for name, value in env.items() if value is not None}
    cluster = checked_cluster(workers=options.workers, ports=Ports(*_ports_of(options)), env=given)
    for model in models:
        fetch_model(model)
    asyncio.run(up(cluster, [find(model, models_dir()).name for model in models]))


def _ports_of(options: argparse.Namespace) -> tuple[int, int, int]:
    """Of the gateway, its HTTP API, and the cache manager; 0: any free one."""
    http_port = (options.port and options.port + 1) if options.http_port is None else options.http_port
    manager_port = defaults.MANAGER_PORT if options.port == defaults.PORT else 0
    return options.port, http_port, manager_port if options.manager_port is None else options.manager_port


def _chat(options: argparse.Namespace) -> None:
    from octavo.commands.chat import Manner, chat

    manner = Manner(
        model=options.model,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        beams=options.beams,
        seed=options.seed,
        retain_seconds=options.retain_seconds,
    )
    chat(options.address, options.prompt, options.system, manner)


def _stats(options: argparse.Namespace) -> None:
    from octavo.commands.stats import stats

    stats(options.address, as_json=options.json)


def _explain(options: argparse.Namespace) -> None:
    from octavo.commands.explain import explain

    explain(options.address, options.prompt, options.system, options.model)


def _audit(options: argparse.Namespace) -> None:
    from octavo.commands.audit import audit

    audit(options.cache_manager.split(","))


def _reset(options: argparse.Namespace) -> None:
    from octavo.commands.reset import reset

    reset(options.cache_manager.split(","), options.worker)


def _key(options: argparse.Namespace) -> None:
    from octavo.commands.key import draw_key

    draw_key()


def _fetch(options: argparse.Namespace) -> None:
    from octavo.commands.model import fetch_model

    print(fetch_model(options.model))


def _demo(options: argparse.Namespace) -> None:
    from deploy.demo import demo

    demo(options.model)


# ---- the command line ----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo",
        description="Serve language models from workers that remember what they have read.",
        epilog="From the environment: OCTAVO_ADDRESS and OCTAVO_CACHE_MANAGER, instead of the options of these names; "
        "OCTAVO_MODEL, which model to fetch and to serve; OCTAVO_API_KEY, where the gateway asks for one.",
    )
    parser.add_argument("--version", action="version", version=f"octavo {version('octavo')}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, does, add_options, run in _VERBS:
        verb = verbs.add_parser(name, help=does, description=_sentence(does))
        add_options(verb)
        verb.set_defaults(run=run)
    return parser


def _sentence(does: str) -> str:
    return f"{does[0].upper()}{does[1:]}."


def _up_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The services take their further settings from the environment: `python -m worker --print-settings`, "
        "likewise gateway and cache_manager, shows them."
    )
    parser.add_argument(
        "--workers", type=_whole(1, MAX_WORKERS), default=2, metavar="N", help="model processes (default 2)"
    )
    parser.add_argument(
        "--port",
        type=_whole(0, 65534),
        default=defaults.PORT,
        help="of the gateway; 0: any free one (default %(default)s)",
    )
    parser.add_argument(
        "--http-port", type=_whole(0, 65535), metavar="PORT", help="of OpenAI's API (default: the one behind --port)"
    )
    parser.add_argument(
        "--manager-port",
        type=_whole(0, 65535),
        metavar="PORT",
        help=f"of the cache manager (default {defaults.MANAGER_PORT}, or any free one where --port is not the default)",
    )
    parser.add_argument(
        "--model",
        default=_default_model(),
        help="smollm2, hub id, folder or GGUF file (default %(default)s), +FOLDER of a LoRA adapter behind it, NAME= "
        "before it; of several, separated by commas, the workers take one each, in turns",
    )
    parser.add_argument(
        "--kv-memory", metavar="SIZE", help="of each worker's pool (default 512MiB; on a GPU what it has left)"
    )
    parser.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16", "float16"], help="of weights and pool (default auto)"
    )
    parser.add_argument(
        "--threads", type=_whole(1, 1024), metavar="N", help="of each worker (default: its share of the cores)"
    )


def _chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the question; without it a conversation begins")
    _add_address(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model should know and be")
    parser.add_argument("--max-tokens", type=_whole(1, (1 << 31) - 1), metavar="N", help="longest answer (default 256)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is the likeliest (default 0)")
    parser.add_argument(
        "--top-k",
        type=_whole(0, (1 << 31) - 1),
        default=0,
        metavar="K",
        help="draw from the K likeliest (default 0: all)",
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="and of the likeliest that hold P (default 1)"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="and of those P times as likely as the first (default 0)"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: repeat less (default 1)"
    )
    parser.add_argument(
        "--beams", type=_whole(0, 64), default=0, metavar="N", help="search with N beams; the answer comes at its end"
    )
    parser.add_argument(
        "--seed", type=_whole(0, (1 << 64) - 1), metavar="N", help="repeats the draws of a temperature above 0"
    )
    parser.add_argument(
        "--retain-seconds",
        type=_whole(0, 7 * 24 * 3600),
        default=0,
        metavar="N",
        help="keep it in the workers' memory for so long, as far as a quota reaches (default 0)",
    )
    parser.add_argument("--model", default="", metavar="NAME", help="where more than one is served")


def _stats_options(parser: argparse.ArgumentParser) -> None:
    _add_address(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def _explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the question, as it would be asked with `octavo chat`")
    _add_address(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model should know and be")
    parser.add_argument("--model", default="", metavar="NAME", help="where more than one is served")


def _reset_options(parser: argparse.ArgumentParser) -> None:
    _add_cache_managers(parser)
    parser.add_argument("--worker", metavar="ID", help="this one alone (default: all of them)")


def _model_options(parser: argparse.ArgumentParser) -> None:
    does = "fetch a model and print the folder where it lies"
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    fetch = verbs.add_parser("fetch", help=does, description=_sentence(does))
    fetch.add_argument("model", nargs="?", default=_default_model(), help="smollm2, a hub id, a folder, or a GGUF file")


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=_default_model(), help="smollm2, hub id, folder or GGUF file (default %(default)s)"
    )


def _add_address(parser: argparse.ArgumentParser) -> None:
    address = os.environ.get("OCTAVO_ADDRESS") or defaults.ADDRESS
    parser.add_argument("--address", default=address, metavar="HOST:PORT", help=f"of the gateway (default {address})")


def _add_cache_managers(parser: argparse.ArgumentParser) -> None:
    managers = os.environ.get("OCTAVO_CACHE_MANAGER") or defaults.CACHE_MANAGER
    parser.add_argument(
        "--cache-manager",
        default=managers,
        metavar="HOST:PORT[,HOST:PORT]",
        help=f"all there are; `octavo up` says where its own is (default {managers})",
    )


def _default_model() -> str:
    return os.environ.get("OCTAVO_MODEL") or "smollm2"


def _whole(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number from `least` to `most`, and says both where it is none."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text}, wanted a whole number from {least} to {most}")
        return number

    return read


_VERBS: tuple[tuple[str, str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]], ...] = (
    ("up", "run a whole Octavo on this machine until Ctrl-C", _up_options, _up),
    ("chat", "ask once, or have a conversation", _chat_options, _chat),
    ("stats", "show the fleet: load, cache, tokens saved", _stats_options, _stats),
    ("explain", "say what workers remember of a question, and what it would cost there", _explain_options, _explain),
    ("audit", "recompute the books of all workers, and say whether they balance", _add_cache_managers, _audit),
    ("reset", "forget what is remembered, while requests run", _reset_options, _reset),
    ("key", "draw an API key, and say what stands for it in a tenants file", lambda _: None, _key),
    ("model", "fetch models", _model_options, _fetch),
    ("demo", "start a stack, visit it, show what prefix hits save, stop it", _demo_options, _demo),
)
"""Name, what it does, its options, and what runs it."""


if __name__ == "__main__":
    main()
