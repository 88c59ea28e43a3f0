"""Small corpora for the tests of the data package."""

import json
import random

from pipeline.data.prepare import PrepareConfig, TokenizerConfig
from pipeline.data.sources import SourceConfig

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "for",
    "it",
    "war",
    "peace",
    "treasury",
    "commerce",
    "don't",
    "1847",
]
WORDS += ["ñandú", "東京", "été", "🙂", "<|bos|>", "\n\n", "\t", ""]


def make_text(seed, words=200):
    generator = random.Random(seed)
    return f"Document {seed}. " + " ".join(generator.choice(WORDS) for _ in range(generator.randint(1, words)))


def write_corpus(folder, documents=60, words=200):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        (folder / f"{number:04d}.txt").write_text(make_text(number, words), encoding="utf-8", newline="")
    return folder


def write_jsonl(path, documents=60, words=200):
    lines = [json.dumps({"id": n, "text": make_text(n, words)}, ensure_ascii=n % 2 == 0) for n in range(documents)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    return path


def config_for(output, *paths, kind="bytes", split="train", **settings):
    tokenizer = settings.pop("tokenizer", None) or TokenizerConfig(kind=kind)
    settings = {"workers": 1, "member_tokens": 1000, "shard_tokens": 5000, "group_bytes": 8000, **settings}
    sources = [SourceConfig(path=str(path), split=split) for path in paths]
    return PrepareConfig(output=str(output), sources=sources, tokenizer=tokenizer, **settings)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
