"""The command ``backfeed``: one verb each for what a user does.

Verbs import what they need when they are called, so that ``--help`` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pipeline import __version__
from pipeline.errors import ConfigError, RunWarning, UserError

JSON = (".json",)

if TYPE_CHECKING:
    from pipeline.training.train import Outcome

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    open_closed_streams()
    options = parse(arguments)
    warnings.formatwarning = one_line_of_warning
    try:
        code = options.run(options)
        sys.stdout.flush()
    except UserError as error:
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        from pipeline.files import describe_os_error

        return fail(describe_os_error(error, error.filename or "the output"), 1)
    except (RuntimeError, MemoryError) as error:
        if "alloc" not in str(error) and not isinstance(error, MemoryError):
            raise
        reason = next(iter(str(error).splitlines()), "the system gave no more")
        return fail(f"not enough memory: {reason[:200]}", 1)
    return int(code)


def open_closed_streams() -> None:
    """Give a process that was started with closed output (``>&-``) somewhere to write."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line; settings may stand before and after options, which argparse alone refuses."""
    root = parser()
    options, rest = root.parse_known_args(arguments)
    if rest and (not hasattr(options, "settings") or any(each.startswith("-") for each in rest)):
        root.error(f"unrecognized arguments: {' '.join(rest)}; see backfeed {options.verb} --help")
    if rest:
        options.settings += rest
    return options


def one_line_of_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return our own warnings without the place in the code, others as Python shows them."""
    if issubclass(category, RunWarning):
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def fail(message: str, code: int) -> int:
    """Print one line on standard error; return ``code``."""
    with contextlib.suppress(OSError):
        print(f"backfeed: {message}", file=sys.stderr)
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    root = argparse.ArgumentParser(prog="backfeed", description="Pretrain transformers that feed their own state back.")
    root.add_argument("--version", action="version", version=f"backfeed {__version__}")
    verbs = root.add_subparsers(title="verbs", required=True, metavar="VERB")
    _add_prepare(verbs)
    _add_convert(verbs)
    _add_train(verbs)
    _add_evaluate(verbs)
    _add_generate(verbs)
    _add_iterate(verbs)
    _add_checkpoint(verbs)
    _add_describe(verbs)
    _add_plan(verbs)
    _add_bench(verbs)
    return root


def _verb(
    verbs: Verbs,
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    verb.set_defaults(run=run, verb=name)
    return verb


def _add_settings(verb: argparse.ArgumentParser, example: str) -> None:
    verb.add_argument(
        "settings",
        nargs="*",
        metavar="FILE|key=value",
        help=f"YAML files, merged left to right, then overrides ({example})",
    )
    verb.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")


def split_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return files and overrides; ConfigError if a file follows an override, since it would not override it."""
    files = [each for each in settings if "=" not in each]
    overrides = [each for each in settings if "=" in each]
    if list(settings) != [*files, *overrides]:
        raise ConfigError("files come first, then overrides (key=value), since overrides have the last word")
    return files, overrides


def _add_prepare(verbs: Verbs) -> None:
    verb = _verb(verbs, "prepare", "turn text into tokenised shards", _prepare)
    _add_settings(verb, "output=data/mine")
    verb.add_argument("--verify", metavar="FOLDER", type=Path, help="check every hash of a prepared folder and stop")


def _prepare(options: argparse.Namespace) -> int:
    from pipeline import config_files
    from pipeline.data.prepare import PrepareConfig, prepare
    from pipeline.data.verify import verify

    if options.verify is not None:
        if options.settings:
            raise ConfigError("--verify takes a prepared folder and no settings")
        manifest = verify(options.verify)
        print(f"{options.verify} is whole, fingerprint {manifest.fingerprint}")
        return 0
    config = config_files.load(PrepareConfig, *split_settings(options.settings))
    if options.print_config:
        print(config_files.to_yaml(config), end="")
        return 0
    manifest = prepare(config)
    for name, split in manifest.splits.items():
        empty = f" ({split.empty_documents:,} empty ones left out)" if split.empty_documents else ""
        print(f"{name}: {split.tokens:,} tokens, {split.documents:,} documents{empty}, {len(split.shards)} shard(s)")
    print(f"vocabulary {manifest.tokenizer.vocab_size:,}, in {manifest.folder}")
    return 0


def _add_convert(verbs: Verbs) -> None:
    verb = _verb(verbs, "convert", "make a pretrained transformer one that feeds back", _convert)
    verb.add_argument("path", type=Path, metavar="SOURCE", help="run, checkpoint, or folder of Hugging Face's")
    verb.add_argument("output", type=Path, metavar="OUTPUT", help="folder to make")
    verb.add_argument("--to", required=True, metavar="ARCHITECTURE", help="crt, fbt, lrt or transformer")
    verb.add_argument("--step", type=int, help="checkpoint of a run to take (default: the newest whole one)")
    verb.add_argument("--seed", type=int, default=0, help="seed of the weights that SOURCE does not have (default: 0)")
    verb.add_argument(
        "settings",
        nargs="*",
        metavar="model.key=value",
        help="settings that SOURCE does not have (model.correction_width=2048)",
    )


def _convert(options: argparse.Namespace) -> int:
    from pipeline.conversion.convert import convert
    from pipeline.conversion.folder import LAYER

    if not 0 <= options.seed < 2**63:
        raise ConfigError(f"--seed is {options.seed}; it must be at least 0 and below 2**63")
    made = convert(options.path, options.output, options.to, options.settings, step=options.step, seed=options.seed)
    print(f"{made.folder}: {made.config.architecture}, {made.parameters:,} parameters, {made.drawn:,} of them new")
    for remark in made.remarks:
        print(remark)
    print(f"train it with: backfeed train {made.folder / LAYER} RECIPE.yaml data.path=...")
    return 0


def _add_train(verbs: Verbs) -> None:
    verb = _verb(verbs, "train", "train a run", _train)
    _add_settings(verb, "solver.interval=4")
    verb.add_argument(
        "--resume",
        choices=["never", "auto", "must"],
        default="never",
        help="go on from the newest whole checkpoint: auto if there is a run, must or fail; never (default) begins one",
    )


def _train(options: argparse.Namespace) -> int:
    from pipeline import config_files
    from pipeline.config import Config

    config = config_files.load(Config, *split_settings(options.settings))
    if options.print_config:
        print(config_files.to_yaml(config), end="")
        return 0
    from pipeline.training import ending
    from pipeline.training.train import train

    code = _say_outcome(train(config, options.resume))
    ending.among_ranks(code)
    return code


def _say_outcome(outcome: Outcome) -> int:
    """Say how training ended; return the exit code."""
    from pipeline.training import distributed

    # The first rank speaks for all: a launcher that ends the job at the first failure (srun --kill-on-bad-exit) would
    # cut it off while it closes its files.
    if not distributed.is_first():
        return 0
    if outcome.signal:
        print(f"stopped at step {outcome.step}, saved; go on with the same command and --resume auto")
        return 128 + outcome.signal
    print(f"done: step {outcome.step}, {outcome.folder}")
    return 0


def _add_trained(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", type=Path, metavar="RUN", help="run folder, or the folder of one checkpoint")
    verb.add_argument("--step", type=int, help="checkpoint of the run to take (default: the newest whole one)")
    verb.add_argument("--device", default="auto", help="cpu, cuda, ... (default: a GPU where there is one)")


def _add_solver(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "settings",
        nargs="*",
        metavar="solver.key=value",
        help="another solver, or other settings, than in training (solver.passes=8)",
    )


def _add_evaluate(verbs: Verbs) -> None:
    verb = _verb(verbs, "evaluate", "measure loss, perplexity and bits per byte of a run", _evaluate)
    _add_trained(verb)
    _add_solver(verb)
    verb.add_argument("--split", help="split of the data (default: the run's validation split)")
    verb.add_argument("--data", type=Path, help="prepared data folder (default: the run's own)")
    verb.add_argument(
        "--tokens", type=int, default=0, help="evaluate on so many tokens, in whole rows, at least one (default: all)"
    )
    verb.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")


def _evaluate(options: argparse.Namespace) -> int:
    from pipeline import devices
    from pipeline.evaluation import report
    from pipeline.runs.loading import load

    if options.tokens < 0:
        raise ConfigError(f"--tokens is {options.tokens}; it must be at least 0 (0 for the whole split)")
    _check_output("json", options.json, JSON)
    trained = load(options.path, step=options.step, device=devices.choose(options.device), overrides=options.settings)
    split = options.split or trained.config.validation.split
    rows = report.report(trained, split, data=options.data, tokens=options.tokens)
    if options.json is not None:  # before the reader of the output can close it
        report.save(rows, trained, split, options.json)
    print(f"{trained.checkpoint.path}, step {trained.checkpoint.step}, split {split}")
    print(report.table(rows))
    return 0


def _add_generate(verbs: Verbs) -> None:
    verb = _verb(verbs, "generate", "write text with a run", _generate)
    _add_trained(verb)
    verb.add_argument("--prompt", default="", help="text to go on from (default: the beginning of a document)")
    verb.add_argument("--tokens", type=int, default=200, help="tokens to write at most (default: 200)")
    verb.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    verb.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest tokens (default: all)")
    verb.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest of total probability p")
    verb.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    verb.add_argument(
        "--decode",
        choices=["trained", "standard", "soft", "fused", "recurrent"],
        default="trained",
        help="trained: as in training (default); standard: nothing is fed back; soft: the prompt in a plain pass, "
        "then every token is fed; fused: it in a plain and a fed pass; recurrent: every token of the prompt is fed too",
    )


def _generate(options: argparse.Namespace) -> int:
    from pipeline import devices
    from pipeline.generation.generate import generate
    from pipeline.generation.sampling import Sampling
    from pipeline.runs.loading import load
    from pipeline.solvers import decoding

    if options.tokens < 1:
        raise ConfigError(f"--tokens is {options.tokens}; it must be at least 1")
    if not 0 <= options.seed < 2**63:
        raise ConfigError(f"--seed is {options.seed}; it must be at least 0 and below 2**63")
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError("--prompt is not valid UTF-8; check the terminal's locale, or write the text again") from None
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    trained = load(options.path, step=options.step, device=devices.choose(options.device))
    solver = decoding(trained.solver, options.decode)
    tokenizer = trained.tokenizer
    prompt = [tokenizer.document_id, *tokenizer.encode(options.prompt)]
    stop, decoder = tokenizer.document_id, tokenizer.stream_decoder()
    sys.stdout.write(options.prompt)
    for drawn in generate(
        trained.model, solver, [prompt], count=options.tokens, sampling=sampling, seed=options.seed, stop=stop
    ):
        if int(drawn[0]) != stop:
            sys.stdout.write(decoder.push(int(drawn[0])))
            sys.stdout.flush()
    print(decoder.flush())
    return 0


def _add_iterate(verbs: Verbs) -> None:
    verb = _verb(verbs, "iterate", "run many more passes than in training, and see whether they settle", _iterate)
    verb.add_argument("paths", type=Path, nargs="+", metavar="RUN", help="run folders, or folders of checkpoints")
    verb.add_argument("--passes", type=int, default=30, help="passes to run (default: 30)")
    verb.add_argument("--split", help="split of the data (default: each run's validation split)")
    verb.add_argument(
        "--tokens", type=int, default=32_768, help="tokens to evaluate on, in whole rows; 0 for all (default: 32768)"
    )
    verb.add_argument("--device", default="auto", help="cpu, cuda, ... (default: a GPU where there is one)")
    verb.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    verb.add_argument("--plot", type=Path, metavar="FILE", help="also draw it (.svg, .png or .pdf)")


def _iterate(options: argparse.Namespace) -> int:
    from pipeline import devices
    from pipeline.evaluation import iteration, iteration_plot
    from pipeline.evaluation.data import EvaluationData
    from pipeline.progress import Progress
    from pipeline.runs.loading import load

    if options.tokens < 0:
        raise ConfigError(f"--tokens is {options.tokens}; it must be at least 0 (0 for the whole split)")
    _check_output("json", options.json, JSON)
    _check_output("plot", options.plot, iteration_plot.FORMATS)
    if options.plot is not None:
        iteration_plot.check()
    loaded = [load(path, device=devices.choose(options.device)) for path in options.paths]
    for trained in loaded:
        iteration.check(trained, options.passes)
    found: dict[str, list[iteration.Pass]] = {}
    for path, trained in zip(options.paths, loaded, strict=True):
        data = EvaluationData.open(trained, options.split or trained.config.validation.split, tokens=options.tokens)
        with Progress(data.rows, "rows", trained.config.run.name) as progress:
            passes = iteration.iterate(
                trained.model, data.batches(), data.token_bytes, options.passes, advanced=progress.advance
            )
        found[str(path)] = passes
        # Files first: whoever reads the output may close it.
        if options.json is not None:
            iteration.save(found, options.json)
        if options.plot is not None:
            iteration_plot.plot(found, options.plot)
        print(f"{trained.checkpoint.path}, step {trained.checkpoint.step}")
        print(iteration.table(passes))
    return 0


def _check_output(option: str, path: Path | None, suffixes: Sequence[str]) -> None:
    """Raise ConfigError unless a result can be written to ``path`` without destroying something else."""
    if path is None:
        return
    if path.suffix not in suffixes:
        raise ConfigError(f"--{option} {path}: the name must end in one of {', '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--{option} {path}: there is no folder {path.absolute().parent}; make it first")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ConfigError(f"--{option} {path}: it is no ordinary file; give another name")


def _add_describe(verbs: Verbs) -> None:
    verb = _verb(verbs, "describe", "count parameters, FLOPs, state and cache of a configuration", _describe)
    _add_settings(verb, "model.width=2048")
    verb.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")


def _describe(options: argparse.Namespace) -> int:
    from pipeline import config_files, description
    from pipeline.config import Config

    _check_output("json", options.json, JSON)
    config = config_files.load(Config, *split_settings(options.settings))
    if options.print_config:
        print(config_files.to_yaml(config), end="")
        return 0
    found = description.describe(config)
    if options.json is not None:
        description.save(found, options.json)
    print(description.table(found))
    return 0


def _add_plan(verbs: Verbs) -> None:
    verb = _verb(verbs, "plan", "predict memory and time of a run, and what makes it fit", _plan)
    _add_settings(verb, "training.strategy=zero2")
    verb.add_argument("--gpus", type=int, metavar="N", help="ranks (default: training.devices x nodes)")
    verb.add_argument("--gpu", default="h100", metavar="NAME", help="kind of GPU, or cpu (default: h100)")
    verb.add_argument("--gpu-memory", metavar="SIZE", help="memory of each, such as 80GiB (default: that of the kind)")
    verb.add_argument("--peak-flops", type=float, metavar="X", help="FLOPs a second of each at best (likewise)")
    verb.add_argument("--utilization", type=float, default=0.4, help="share of them that a run gets (default: 0.4)")
    verb.add_argument("--time-limit", default="24:00:00", help="of a Slurm job (default: 24:00:00)")
    verb.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")


def _plan(options: argparse.Namespace) -> int:
    from pipeline import config_files
    from pipeline.config import Config

    _check_output("json", options.json, JSON)
    files, overrides = split_settings(options.settings)
    if options.gpus is not None:
        overrides += [f"training.devices={options.gpus}", "training.nodes=1"]
    config = config_files.load(Config, files, overrides)
    if options.print_config:
        print(config_files.to_yaml(config), end="")
        return 0
    from pipeline.planning import machines, report
    from pipeline.planning.plan import plan, save

    machine = machines.machine(
        options.gpu,
        config.training.precision,
        memory=options.gpu_memory,
        peak_flops=options.peak_flops,
        utilization=options.utilization,
        time_limit=options.time_limit,
    )
    with report.Looking() as looking:
        found = plan(config, machine, advanced=looking)
    if options.json is not None:
        save(found, options.json)
    print(report.text(found))
    return 0


def _add_checkpoint(verbs: Verbs) -> None:
    verb = _verb(verbs, "checkpoint", "list, verify or consolidate the checkpoints of a run", _checkpoint)
    tasks = verb.add_subparsers(title="tasks", dest="task", required=True, metavar="TASK")
    for name, text in (
        ("list", "show which checkpoints there are"),
        ("verify", "check every hash"),
        ("consolidate", "put the weights of a checkpoint into one file"),
    ):
        task = tasks.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        task.add_argument("path", type=Path, metavar="PATH", help="a run folder, or the folder of one checkpoint")
        if name != "list":
            task.add_argument("--step", type=int, help="of a run folder, the checkpoint to take (default: see docs)")
        if name == "consolidate":
            task.add_argument("output", type=Path, metavar="OUTPUT", help="folder to make")


def _checkpoint(options: argparse.Namespace) -> int:
    from pipeline.runs import inspection

    if options.task == "list":
        print(inspection.table(inspection.found(options.path)))
        return 0
    if options.task == "verify":
        return 0 if inspection.verify(options.path, options.step) else 1
    inspection.consolidate(options.path, options.step, options.output)
    return 0


def _add_bench(verbs: Verbs) -> None:
    from pipeline.bench import BENCHMARKS

    verb = _verb(verbs, "bench", "measure, and print a table", _bench)
    told = "; ".join(f"{name}: {text}" for name, text in BENCHMARKS.items())
    verb.add_argument("benchmark", choices=list(BENCHMARKS), metavar="BENCHMARK", help=told)
    verb.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    verb.add_argument(
        "--shape", action="append", default=[], metavar="NAME", help="measure this size alone; may be given repeatedly"
    )
    verb.add_argument("--repeats", type=int, metavar="N", help="timed runs of each, of which the median counts")
    verb.add_argument("--threads", type=int, default=0, metavar="N", help="threads of the CPU (default: its cores)")
    verb.add_argument("--data", type=Path, metavar="FOLDER", help="pairs: prepared corpus (default: data/sotu)")
    verb.add_argument("--install", action="store_true", help="peers: install what is missing of them first")


def _bench(options: argparse.Namespace) -> int:
    from pipeline import bench
    from pipeline.bench.options import Options

    _check_output("json", options.json, JSON)
    wanted = Options(tuple(options.shape), options.repeats, options.data, options.install)
    return bench.run(options.benchmark, wanted, threads=options.threads, file=options.json)


if __name__ == "__main__":
    sys.exit(main())
