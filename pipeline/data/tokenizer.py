"""Tokenizers: byte-level BPE or any ``tokenizer.json`` through the tokenizers library, and plain bytes.

Every document in the shards begins with the *document token*. Text never turns into it, nor into another special
token: what looks like one in a text is encoded as ordinary characters.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from pipeline.data.manifest import TOKEN_BYTES_FILE, TOKENIZER_FILE, Manifest
from pipeline.errors import ConfigError, DataError
from pipeline.files import describe_os_error

DOCUMENT_TOKEN = "<|bos|>"
USUAL_DOCUMENT_TOKENS = (
    "<|bos|>",
    "<|begin_of_text|>",
    "<|startoftext|>",
    "<|endoftext|>",
    "<bos>",
    "<s>",
    "[BOS]",
    "<|end_of_text|>",
    "</s>",
)
BYTES_FORMAT = "backfeed-bytes"

# Longer texts are cut before they are encoded, to bound memory, where the cut cannot change the result: before a
# single space that stands between a character and a letter, which always begins a new word of the byte-level rule.
_PIECE = 1 << 20
_SAFE_CUT = re.compile(r"(?<=[^\s]) (?=[A-Za-z])")


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        kind: ``bytes``, or ``json`` for a file of the tokenizers library.
        vocab_size: one more than the largest id.
        document_token: text form of the token that begins a document.
        document_id: its id.
        token_bytes: UTF-8 bytes that each id stands for; 0 for special tokens.
        exact_bytes: whether the bytes of a text's tokens always add up to the bytes of the text.
        sha256: hash of the tokenizer's file.
    """

    def __init__(self, content: bytes, document_token: str | None = None, where: str = "tokenizer") -> None:
        self.content = content
        self.sha256 = hashlib.sha256(content).hexdigest()
        description = _parse(content, where)
        self._inner: tokenizers.Tokenizer | None = None
        if description.get("format") == BYTES_FORMAT:
            self.kind = "bytes"
            self.document_token = str(description.get("document_token") or DOCUMENT_TOKEN)
            self.document_id, self.vocab_size, self.exact_bytes = 256, 257, True
            self._special = {256}
            self._pieces: list[bytes] | None = [bytes([value]) for value in range(256)] + [b""]
            self.token_bytes = np.array([1] * 256 + [0], dtype=np.int64)
            return
        self.kind = "json"
        self._inner = inner = _load_inner(content, where)
        self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.vocab_size < 2:
            raise DataError(f"{where}: the tokenizer's vocabulary is empty")
        added = inner.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        self.document_token = document_token or _find_document_token(inner, where)
        self.document_id = self._check_document_token(where)
        byte_level = _uses_byte_level(description)
        self._pieces = _byte_pieces(inner, self.vocab_size, self._special) if byte_level else None
        plain = not description.get("normalizer") and not _adds_prefix_space(description)
        self.exact_bytes = byte_level and plain
        self._cuttable = self.exact_bytes and _splits_as_gpt2(description) and self._special == set(added)
        self.token_bytes = self._count_bytes()

    @classmethod
    def from_file(cls, path: str | Path, document_token: str | None = None) -> Tokenizer:
        """Load a ``tokenizer.json``.

        Args:
            path: the file.
            document_token: the token that begins a document; by default the first of the usual ones it has.
        """
        return cls(_read(Path(path)), document_token, str(path))

    @classmethod
    def load(cls, source: str | Path | Manifest) -> Tokenizer:
        """Load the tokenizer of a prepared data folder and make sure that it is the one its shards were made with."""
        manifest = source if isinstance(source, Manifest) else Manifest.load(source)
        entry, path = manifest.tokenizer, manifest.folder / TOKENIZER_FILE
        content = _read(path)
        digest = hashlib.sha256(content).hexdigest()
        if digest != entry.sha256:
            raise DataError(
                f"{path} does not fit the shards: its SHA-256 is {digest[:16]}..., but the manifest was made with "
                f"{entry.sha256[:16]}...; restore the file or prepare the data again"
            )
        result = cls(content, entry.document_token, str(path))
        if (result.vocab_size, result.document_id) != (entry.vocab_size, entry.document_id):
            raise DataError(
                f"{path} does not fit the shards: its vocabulary size and document token are {result.vocab_size} and "
                f"{result.document_id}, the manifest says {entry.vocab_size} and {entry.document_id}; prepare again"
            )
        return result

    @classmethod
    def bytes_tokenizer(cls, document_token: str | None = None) -> Tokenizer:
        """Return the tokenizer whose ids are the bytes of UTF-8, with the document token as number 256."""
        description = {"format": BYTES_FORMAT, "version": 1, "document_token": document_token or DOCUMENT_TOKEN}
        return cls((json.dumps(description, indent=2) + "\n").encode())

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, document_token: str | None = None) -> Tokenizer:
        """Train a byte-level BPE tokenizer; the same texts give the same tokenizer.

        Args:
            texts: texts to train on.
            vocab_size: size of the vocabulary, the document token and the 256 bytes included; small texts may give
                fewer tokens.
            document_token: text form of the token that begins a document.
        """
        token = document_token or DOCUMENT_TOKEN
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[token],
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner.to_str(pretty=True).encode("utf-8"), token)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without a document token; nothing in the text becomes a special token."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a text as an array, see ``encode``."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the ids of each text, see ``encode``."""
        if self._inner is None:
            return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64) for text in texts]
        pieces = [list(_cut(text)) if self._cuttable else [text] for text in texts]
        encoded = self._encode_pieces([piece for group in pieces for piece in group])
        result = [np.concatenate([next(encoded) for _ in group]) for group in pieces]
        # The promise of documents that begin only where a document begins rests on this check.
        if any((ids == self.document_id).any() for ids in result):
            raise DataError(
                f"the tokenizer turns ordinary text into its document token {self.document_token!r}; choose another "
                f"tokenizer.document_token"
            )
        return result

    def _encode_pieces(self, pieces: list[str]) -> Iterator[NDArray[np.int64]]:
        assert self._inner is not None
        while pieces:
            # The library's own results take far more memory than the ids: not too many at once.
            sizes = itertools.accumulate(len(piece) for piece in pieces)
            count = max(1, sum(1 for _ in itertools.takewhile(lambda size: size <= 4 * _PIECE, sizes)))
            for encoding in self._inner.encode_batch_fast(pieces[:count], add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.int64)
            pieces = pieces[count:]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some ids; special tokens are left out, broken UTF-8 shows as the replacement character."""
        numbers = [int(number) for number in ids]
        for number in numbers:
            if not 0 <= number < self.vocab_size:
                raise DataError(f"token id {number} is outside the vocabulary (0 to {self.vocab_size - 1})")
        if self._pieces is not None:
            return b"".join(self._pieces[number] for number in numbers).decode("utf-8", errors="replace")
        assert self._inner is not None
        return self._inner.decode(numbers, skip_special_tokens=True)

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder that takes one id after the other."""
        return StreamDecoder(self)

    def _check_document_token(self, where: str) -> int:
        assert self._inner is not None
        number = self._inner.token_to_id(self.document_token)
        if number is None:
            raise ConfigError(
                f"tokenizer.document_token is {self.document_token!r}, which is not in the vocabulary of {where}; "
                f"name a token that is"
            )
        if self._inner.encode(self.document_token, add_special_tokens=False).ids == [number]:
            raise ConfigError(
                f"tokenizer.document_token is {self.document_token!r}, which {where} produces from ordinary text too; "
                f"name a token that the file marks as special"
            )
        self._special = self._special | {number}
        return number

    def _count_bytes(self) -> NDArray[np.int64]:
        if self._pieces is not None:
            return np.array([len(piece) for piece in self._pieces], dtype=np.int64)
        assert self._inner is not None
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self._inner.get_vocab(with_added_tokens=True).items():
            counts[number] = 0 if number in self._special else _guess_bytes(token)
        return counts


class StreamDecoder:
    """Decodes ids one at a time, giving out text only where its characters are whole.

    All that ``push`` returned, followed by ``flush``, is what ``Tokenizer.decode`` makes of all ids together.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []
        self._given = ""

    def push(self, number: int) -> str:
        """Take one id; return the text that is now certain, often empty or one word."""
        pieces = self._tokenizer._pieces
        if pieces is not None:
            if not 0 <= number < len(pieces):
                raise DataError(f"token id {number} is outside the vocabulary (0 to {len(pieces) - 1})")
            return self._utf8.decode(pieces[number])
        self._ids.append(number)
        text = self._tokenizer.decode(self._ids)
        # A trailing replacement character may yet become a whole one.
        certain = text.rstrip("\ufffd")
        if not certain.startswith(self._given):
            return ""
        new, self._given = certain[len(self._given) :], certain
        return new

    def flush(self) -> str:
        """Return what is left, broken characters as replacement characters, and begin anew."""
        if self._tokenizer._pieces is not None:
            rest = self._utf8.decode(b"", final=True)
            self._utf8.reset()
            return rest
        rest = self._tokenizer.decode(self._ids)[len(self._given) :]
        self._ids, self._given = [], ""
        return rest


def load_token_bytes(manifest: Manifest) -> NDArray[np.int64]:
    """Return the UTF-8 bytes that each token id stands for, from the prepared folder, without the tokenizer."""
    path = manifest.folder / TOKEN_BYTES_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{describe_os_error(error, path)}; restore the file or prepare the data again") from None
    if hashlib.sha256(content).hexdigest() != manifest.tokenizer.token_bytes_sha256:
        raise DataError(f"{path} is damaged (its SHA-256 is not the manifest's); restore it or prepare the data again")
    return np.frombuffer(content, dtype="<u4").astype(np.int64)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {describe_os_error(error, path)}") from None


def _parse(content: bytes, where: str) -> dict[str, Any]:
    try:
        description = json.loads(content)
    except ValueError:
        description = None
    if not isinstance(description, dict):
        raise DataError(f"{where} is not a tokenizer.json: it holds no JSON object")
    return description


def _load_inner(content: bytes, where: str) -> tokenizers.Tokenizer:
    try:
        inner = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{where} is not a file of the tokenizers library: {' '.join(str(error).split())}") from None
    # A file may come with settings for inference batches; shards need whole texts, and special tokens as text.
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    return inner


def _find_document_token(inner: tokenizers.Tokenizer, where: str) -> str:
    for token in USUAL_DOCUMENT_TOKENS:
        if inner.token_to_id(token) is not None:
            return token
    raise ConfigError(
        f"{where} has none of the usual tokens that begin a document ({', '.join(USUAL_DOCUMENT_TOKENS)}); set "
        f"tokenizer.document_token to one of its special tokens"
    )


def _parts(section: Any) -> Iterator[dict[str, Any]]:
    """Yield a section of a tokenizer.json, or the members of the sequence that it is."""
    if isinstance(section, dict):
        members = section.get("pretokenizers") or section.get("decoders") or section.get("normalizers")
        yield from members if members else [section]


def _uses_byte_level(description: dict[str, Any]) -> bool:
    return all(
        any(part.get("type") == "ByteLevel" for part in _parts(description.get(name)))
        for name in ("pre_tokenizer", "decoder")
    )


def _adds_prefix_space(description: dict[str, Any]) -> bool:
    return any(part.get("add_prefix_space", False) for part in _parts(description.get("pre_tokenizer")))


def _splits_as_gpt2(description: dict[str, Any]) -> bool:
    section = description.get("pre_tokenizer") or {}
    return section.get("type") == "ByteLevel" and section.get("use_regex", True)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of the byte-level alphabet stands for (Radford et al. 2019)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [value for value in range(256) if value not in set(shown)]
    return {chr(value): value for value in shown} | {chr(256 + place): value for place, value in enumerate(hidden)}


def _byte_pieces(inner: tokenizers.Tokenizer, vocab_size: int, special: set[int]) -> list[bytes]:
    alphabet = _byte_alphabet()
    added = inner.get_added_tokens_decoder()
    pieces = [b""] * vocab_size
    for token, number in inner.get_vocab(with_added_tokens=True).items():
        if number in special:
            continue
        if number in added or not all(character in alphabet for character in token):
            pieces[number] = token.encode("utf-8")
        else:
            pieces[number] = bytes(alphabet[character] for character in token)
    return pieces


def _guess_bytes(token: str) -> int:
    """Count the bytes of a token of another kind: SentencePiece's bytes and spaces, WordPiece's continuations."""
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return 1
    return len(token.removeprefix("##").replace("\u2581", " ").encode("utf-8"))


def _cut(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE:
        place = _SAFE_CUT.search(text, start + _PIECE)
        if place is None:
            break
        yield text[start : place.start()]
        start = place.start()
    yield text[start:]
