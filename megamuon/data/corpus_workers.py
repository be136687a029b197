"""Encoding in parallel: worker processes that turn chunks of text into ids, in order.

Owns the processes and their pipes.  Invariants: results come in the order of the chunks, for any
number of workers; memory holds one chunk per worker; a worker that dies is an error, never a wait.
Tested by ``tests/tools/test_preprocess_data.py``.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import NoReturn

from megamuon.data.corpus import Chunk, CorpusError, CorpusOptions, Encoded, Encoder
from megamuon.data.corpus_streams import first_line
from megamuon.data.tokenizer import Tokenizer


def _serve(
    pipe: Connection, make_tokenizer: Callable[[], Tokenizer], options: CorpusOptions
) -> None:
    """A worker: answer every chunk with what it encodes to, or with why it cannot be."""
    try:
        encoder: Encoder | None = None
        while True:
            piece = pipe.recv()
            try:
                encoder = encoder or Encoder(make_tokenizer(), options)
                answer: Encoded | CorpusError = encoder(piece)
            except CorpusError as error:
                answer = error
            except Exception as error:  # of whatever class: it may not survive the pipe
                answer = CorpusError(_in_one_line(piece, error))
            pipe.send(answer)
    except (EOFError, OSError, KeyboardInterrupt):
        return  # the parent is done, or gone


def _in_one_line(piece: Chunk, error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"{_place(piece)}: out of memory; try fewer --workers"
    if isinstance(error, ValueError | OSError | ImportError):  # they name what is wrong themselves
        return first_line(error)
    return f"{_place(piece)}: cannot be encoded ({type(error).__name__}: {first_line(error)})"


def _place(piece: Chunk) -> str:
    if piece.lines:
        return f"{piece.file}:{piece.first_line}-{piece.first_line + len(piece.lines) - 1}"
    first, *rest = piece.text_files
    return f"{first} or one of the {len(rest)} files after it" if rest else first


class _Workers:
    """Processes with one chunk each in flight, dealt and collected in turn.

    Turns keep the order without bookkeeping, one chunk in flight cannot fill both directions of a
    pipe, and a worker that dies closes its pipe, which is an error rather than a wait.
    """

    def __init__(self, make_tokenizer: Callable[[], Tokenizer], options: CorpusOptions) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.Process] = []
        self._sent: list[Chunk | None] = [None] * options.workers  # what each works on
        for _ in range(options.workers):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(
                target=_serve, args=(theirs, make_tokenizer, options), daemon=True
            )
            process.start()
            theirs.close()  # so that the end of the worker is the end of the pipe
            self._pipes.append(ours)
            self._processes.append(process)

    def map(self, pieces: Iterable[Chunk]) -> Iterator[Encoded]:
        """Encoded pieces in order."""
        count = len(self._pipes)
        sent = 0
        for piece in pieces:
            if sent >= count:
                yield self._receive(sent % count)
            try:
                self._sent[sent % count] = piece
                self._pipes[sent % count].send(piece)
            except OSError:
                self._dead(sent % count)
            sent += 1
        for turn in range(max(0, sent - count), sent):
            yield self._receive(turn % count)

    def _receive(self, worker: int) -> Encoded:
        try:
            answer = self._pipes[worker].recv()
        except (EOFError, OSError):
            self._dead(worker)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _dead(self, worker: int) -> NoReturn:
        process = self._processes[worker]
        process.join(timeout=5)
        killed = process.exitcode is not None and process.exitcode < 0
        hint = "; out of memory? Try fewer --workers" if process.exitcode == -signal.SIGKILL else ""
        end = f"was killed by signal {-process.exitcode}" if killed else "ended"
        where = self._sent[worker]
        raise CorpusError(
            f"{_place(where) + ': ' if where is not None else ''}worker {worker} (process "
            f"{process.pid}) {end} with exit code {process.exitcode}{hint}"
        )

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()


def encode_all(
    pieces: Iterable[Chunk], make_tokenizer: Callable[[], Tokenizer], options: CorpusOptions
) -> Iterator[Encoded]:
    """Encoded chunks in input order.

    ``make_tokenizer`` must be picklable; each worker calls it once.
    """
    if options.workers <= 1:
        encoder = Encoder(make_tokenizer(), options)
        for piece in pieces:
            try:
                encoded = encoder(piece)
            except CorpusError:
                raise
            except Exception as error:
                raise CorpusError(_in_one_line(piece, error)) from error
            yield encoded
        return
    workers = _Workers(make_tokenizer, options)
    try:
        yield from workers.map(pieces)
    finally:
        workers.close()
