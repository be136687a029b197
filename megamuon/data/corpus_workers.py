"""Encoding in parallel: worker processes that turn chunks of text into ids, in order.

Owns the processes and their pipes.  Invariants: results come in the order of the chunks, for any
number of workers; memory holds one chunk per worker; a worker that dies is an error, never a wait.
Tested by ``tests/tools/test_preprocess_data.py``.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import NoReturn

from megamuon.data.corpus import Chunk, CorpusError, CorpusOptions, Encoded, Encoder
from megamuon.data.tokenizer import Tokenizer


def _serve(
    pipe: Connection, make_tokenizer: Callable[[], Tokenizer], options: CorpusOptions
) -> None:
    """A worker: answer every chunk with what it encodes to, or with the exception."""
    try:
        encoder = Encoder(make_tokenizer(), options)
        while True:
            piece = pipe.recv()
            try:
                pipe.send(encoder(piece))
            except CorpusError as error:
                pipe.send(error)
    except (EOFError, KeyboardInterrupt):
        return  # the parent is done, or gone


class _Workers:
    """Processes with one chunk each in flight, dealt and collected in turn.

    Turns keep the order without bookkeeping, one chunk in flight cannot fill both directions of a
    pipe, and a worker that dies closes its pipe, which is an error rather than a wait.
    """

    def __init__(self, make_tokenizer: Callable[[], Tokenizer], options: CorpusOptions) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.Process] = []
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
        raise CorpusError(
            f"worker {worker} (process {process.pid}) ended with exit code {process.exitcode}; "
            "out of memory? Try fewer --workers"
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
            yield encoder(piece)
        return
    workers = _Workers(make_tokenizer, options)
    try:
        yield from workers.map(pieces)
    finally:
        workers.close()
