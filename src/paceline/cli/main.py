"""The `paceline` command. Each subcommand is a module; only the one asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "run": "train from a run file: start every service, show progress, stop them all at the end",
    "up": "start every service of a run file and keep them up until Ctrl-C",
    "status": "what every process of a run does and waits for",
    "logs": "logs of a run's processes",
    "audit": "the account of every prompt; exit 1 when it does not balance",
    "eval": "run an evaluation on a live run",
    "export": "write a Hugging Face model folder from a checkpoint",
    "config": "show a run file with every default and override applied",
    "doctor": "check that this machine can run everything",
}


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    # The folder of the run file's own code (rewards, sources) is the one the command is given in.
    sys.path.insert(0, "")
    parser = argparse.ArgumentParser(prog="paceline", description="Reinforcement learning for large language models.")
    chosen = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    usage = parser
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            module = importlib.import_module(f"paceline.cli.{name}_command")
            module.add_arguments(command)
            command.set_defaults(handler=module.run)
            usage = command
    arguments, extra = parser.parse_known_args()
    # argparse takes key=value words after a flag for strangers.
    if extra and not (hasattr(arguments, "overrides") and all("=" in word and word[0] != "-" for word in extra)):
        usage.error(f"unrecognized arguments: {' '.join(extra)}")
    if extra:
        arguments.overrides = [*arguments.overrides, *extra]

    from paceline.config import ConfigError

    try:
        code = arguments.handler(arguments)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"paceline {arguments.command}: {line}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of a pipe (head, less) has gone: nothing is left to say to anyone.
        sys.stderr.close()
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    main()
