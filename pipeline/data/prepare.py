"""``backfeed prepare``: text becomes a folder of token shards with a manifest, in parallel, and can be interrupted.

The work is planned first: an ordered list of groups of inputs. Which process makes which group, and how often the
preparation was killed, does not show in the result, which is the same to the byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.cores import available_cores
from pipeline.data.groups import (
    STATE_FOLDER,
    Group,
    Settings,
    divide,
    load_record,
    make_group,
    start_worker,
    work,
)
from pipeline.data.manifest import (
    MANIFEST_FILE,
    TOKEN_BYTES_FILE,
    TOKENIZER_FILE,
    Manifest,
    Split,
    TokenizerEntry,
    check_shards,
)
from pipeline.data.prepare_config import PrepareConfig, TokenizerConfig
from pipeline.data.sources import SourceConfig, Unit, find_units
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.tokenizer_making import make_tokenizer, say
from pipeline.errors import DataError
from pipeline.files import describe_os_error, sha256_file, write_atomically
from pipeline.progress import Progress

PLAN_VERSION = 1
LOCK_FILE = ".lock"
PLAN_FILE = "plan.txt"

__all__ = ["PrepareConfig", "SourceConfig", "TokenizerConfig", "prepare"]


def prepare(config: PrepareConfig) -> Manifest:
    """Make a data folder, or go on where an earlier preparation with the same plan stopped.

    Returns:
        The manifest of the finished folder.
    """
    config.check()
    output = Path(config.output)
    units = find_units(config.sources, config.group_bytes)
    groups = divide(units, config.group_bytes)
    plan = _fingerprint(config, units)
    if (output / MANIFEST_FILE).exists():
        return _finished(output, plan)
    try:
        _refuse_strangers(output)
        (output / STATE_FOLDER).mkdir(parents=True, exist_ok=True)
        with _lock(output):
            _begin(output, plan)
            tokenizer = make_tokenizer(config, output, groups)
            settings = _settings(config, output, plan, tokenizer)
            made = _make_groups(groups, settings, tokenizer, config.workers)
            manifest = _assemble(config, units, settings, tokenizer, made)
            manifest.save()
        shutil.rmtree(output / STATE_FOLDER, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write {describe_os_error(error, error.filename or output)} (what is finished is kept; the same "
            f"command goes on from there)"
        ) from None
    return manifest


def _fingerprint(config: PrepareConfig, units: list[Unit]) -> str:
    """Return a hash of all that decides the result: settings, inputs, tokenizer file; not the paths or workers."""
    tokenizer = asdict(config.tokenizer)
    if config.tokenizer.path is not None:
        path = config.tokenizer.path
        try:
            tokenizer["path"] = sha256_file(path)
        except OSError as error:
            raise DataError(f"tokenizer.path: {describe_os_error(error, path)}") from None
    content = {
        "version": PLAN_VERSION,
        "tokenizer": tokenizer,
        "holdout": dict(sorted(config.holdout.items())),
        "sizes": [config.shard_tokens, config.member_tokens, config.group_bytes],
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for unit in units:
        digest.update(json.dumps(unit.identity()).encode())
    return digest.hexdigest()


def _finished(output: Path, plan: str) -> Manifest:
    """Return the manifest of a folder that is finished already, if it is the one wanted."""
    manifest = Manifest.load(output)
    if manifest.plan != plan:
        raise DataError(
            f"{output} already holds data prepared from other sources or settings; choose another output, or delete "
            f"the folder first"
        )
    check_shards(manifest)
    shutil.rmtree(output / STATE_FOLDER, ignore_errors=True)
    say(f"{output} is complete already; nothing to do")
    return manifest


def _refuse_strangers(output: Path) -> None:
    """Raise DataError where the output is not a new folder nor one that a preparation has begun."""
    if not output.exists() or (output / STATE_FOLDER / PLAN_FILE).exists():
        return
    if not output.is_dir():
        raise DataError(f"output {output} is a file; choose a new folder")
    strangers = sorted(entry.name for entry in output.iterdir() if entry.name != STATE_FOLDER)
    if strangers:
        raise DataError(f"output folder {output} is not empty (it holds {strangers[0]!r}); choose a new folder")


@contextlib.contextmanager
def _lock(output: Path) -> Iterator[None]:
    """Keep a second ``prepare`` out of the folder while this process lives."""
    with open(output / STATE_FOLDER / LOCK_FILE, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another prepare is working on {output}; wait for it, or choose another output") from None
        except OSError:
            pass  # a file system without locks
        yield


def _begin(output: Path, plan: str) -> None:
    """Claim the folder for a plan, or make sure that it is claimed for this one; drop what was left half-written."""
    path = output / STATE_FOLDER / PLAN_FILE
    if path.exists() and path.read_text() != plan and not any(path.parent.glob("group-*.json")):
        # Nothing was finished (a bad file was found and mended, say): there is nothing to lose by beginning anew.
        for made in (output / TOKENIZER_FILE, output / TOKEN_BYTES_FILE, *output.glob("*.tar"), path):
            made.unlink(missing_ok=True)
    if path.exists():
        if path.read_text() != plan:
            raise DataError(
                f"{output} holds an unfinished preparation from other sources or settings; start it again as it was, "
                f"or delete the folder, or choose another output"
            )
        say(f"going on with the unfinished preparation in {output}")
    else:
        write_atomically(path, plan)
    for leftover in [*output.glob(f"{STATE_FOLDER}/*.partial"), *output.glob(".*.partial")]:
        leftover.unlink(missing_ok=True)


def _settings(config: PrepareConfig, output: Path, plan: str, tokenizer: Tokenizer) -> Settings:
    return Settings(
        output=output,
        plan=plan,
        holdout=dict(config.holdout),
        dtype="uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        shard_tokens=config.shard_tokens,
        member_tokens=config.member_tokens,
        document_token=tokenizer.document_token,
    )


def _make_groups(groups: list[Group], settings: Settings, tokenizer: Tokenizer, workers: int) -> list[dict[str, Split]]:
    """Make all groups that are not finished; return what each group made, in order."""
    found = {group.number: load_record(settings.output, group.number, settings.plan) for group in groups}
    made = {number: splits for number, splits in found.items() if splits is not None}
    pending = [group for group in groups if group.number not in made]
    done = sum(group.bytes for group in groups if group.number in made)
    workers = min(workers or available_cores(), len(pending))
    with Progress(sum(group.bytes for group in groups), "B", "prepare", initial=done) as progress:
        results = _in_process(pending, settings, tokenizer) if workers < 2 else _in_pool(pending, settings, workers)
        tokens = 0
        try:
            for group, splits in results:
                made[group.number] = splits
                tokens += sum(split.tokens for split in splits.values())
                progress.advance(group.bytes, tokens=f"{tokens:,}")
        except KeyboardInterrupt:
            say(f"interrupted; {len(made)} of {len(groups)} groups are kept, the same command goes on from there")
            raise
    return [made[group.number] for group in groups]


def _in_process(
    groups: list[Group], settings: Settings, tokenizer: Tokenizer
) -> Iterator[tuple[Group, dict[str, Split]]]:
    for group in groups:
        yield group, make_group(group, settings, tokenizer)


def _in_pool(groups: list[Group], settings: Settings, workers: int) -> Iterator[tuple[Group, dict[str, Split]]]:
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, start_worker, (settings, stop))
    try:
        with _no_interrupts():
            futures: dict[Future[dict[str, Split]], Group] = {pool.submit(work, group): group for group in groups}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process died (killed, or out of memory: fewer workers need less); what is finished is kept, the "
            "same command goes on from there"
        ) from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Put Ctrl-C off; processes started meanwhile never see it, not even while they are still starting."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _assemble(
    config: PrepareConfig, units: list[Unit], settings: Settings, tokenizer: Tokenizer, made: list[dict[str, Split]]
) -> Manifest:
    names = list(dict.fromkeys([*(source.split for source in config.sources), *sorted(config.holdout)]))
    splits = {}
    for name in names:
        parts = [splits_of_group[name] for splits_of_group in made if name in splits_of_group]
        shards = tuple(shard for part in parts for shard in part.shards)
        splits[name] = Split(shards, sum(part.empty_documents for part in parts))
        if not shards:
            say(f"warning: split {name!r} got no documents")
    if not any(split.tokens for split in splits.values()):
        raise DataError("the sources hold no text at all: every document is empty")
    entry = TokenizerEntry(
        kind=config.tokenizer.kind,
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        document_token=tokenizer.document_token,
        document_id=tokenizer.document_id,
        token_bytes_sha256=sha256_file(settings.output / TOKEN_BYTES_FILE),
        exact_bytes=tokenizer.exact_bytes,
    )
    return Manifest(settings.output, entry, settings.dtype, splits, settings.plan, _describe(config), _plain(config))


def _describe(config: PrepareConfig) -> list[dict[str, Any]]:
    return [asdict(source) for source in config.sources]


def _plain(config: PrepareConfig) -> dict[str, Any]:
    """Return the settings that decide the result, for the human reader of the manifest."""
    plain = asdict(config)
    for name in ("output", "workers", "sources"):
        del plain[name]
    return plain
