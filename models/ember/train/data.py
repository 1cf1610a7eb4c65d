"""Rows of tokens for training and testing, packed from samples by worker processes.

A row holds whole conversations of up to ROW tokens, one after the other; attention never crosses from one into the next.
Three arrays describe it: token ids, which tokens are answers, and the number of the conversation a token belongs to.
"""

import multiprocessing
import os
from dataclasses import dataclass

import numpy
from tokenizers import Tokenizer

import render
from corpus import essays, mix
from corpus.sample import rng_for

ROW = 2048
# Rows a worker hands over at once, and conversations it tokenizes at once (one call has a fixed price).
BLOCK_ROWS, BATCH_SAMPLES = 32, 256
# Share of plain documents among samples, for the completions endpoint.
DOCUMENTS = 0.01
COMPACT = (",", ":")


@dataclass
class Rows:
    """Arrays of shape [rows, ROW]."""

    ids: numpy.ndarray
    answer: numpy.ndarray
    document: numpy.ndarray


def tokenized(tokenizer, conversations):
    """(ids, answer flags) of each list of pieces, all in one call of the tokenizer."""
    texts = [text for pieces in conversations for text, _ in pieces]
    encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    for pieces in conversations:
        ids, flags = [], []
        for _, flag in pieces:
            piece = next(encodings).ids
            ids += piece
            flags += [flag] * len(piece)
        yield ids, flags


def pack(conversations, pad):
    """Yields rows: each conversation goes into the first open row with room; a row leaves when it is nearly full."""
    open_rows = []
    for ids, flags in conversations:
        if len(ids) > ROW:
            continue
        row = next((row for row in open_rows if len(row[0]) + len(ids) <= ROW), None)
        if row is None:
            row = ([], [], [])
            open_rows.append(row)
        number = row[2][-1] + 1 if row[2] else 1
        row[0].extend(ids)
        row[1].extend(flags)
        row[2].extend([number] * len(ids))
        full = next((row for row in open_rows if len(row[0]) > ROW - 16 or len(open_rows) > 8), None)
        if full is not None:
            open_rows.remove(full)
            yield padded(full, pad)
    yield from (padded(row, pad) for row in open_rows)


def padded(row, pad):
    """The row at full length. Padding is a conversation of its own, number 0."""
    return tuple(values + [fill] * (ROW - len(values)) for values, fill in zip(row, (pad, 0, 0)))


def stacked(rows):
    ids, answer, document = zip(*rows)
    return Rows(numpy.array(ids, numpy.int16), numpy.array(answer, numpy.uint8), numpy.array(document, numpy.uint8))


def training_pieces(rng, chances):
    """One training conversation as pieces: a task by its chance, or a plain document."""
    if rng.random() < DOCUMENTS:
        return [(render.BEGIN, False), (essays.document(rng) + render.TEXT_END, True)]
    task = rng.choices(list(chances), chances.values())[0]
    sample = mix.train_sample(rng, task)
    separators = COMPACT if rng.random() < 0.5 else (", ", ": ")
    return list(render.pieces(sample.messages, sample.tools, separators))


def mean_tokens(tokenizer, n=60):
    """Mean length of each task's conversations, to turn shares of tokens into chances."""
    means = {}
    for task in mix.SHARES:
        samples = (mix.train_sample(rng_for("mean", task, i), task) for i in range(n))
        lengths = [
            len(ids) for ids, _ in tokenized(tokenizer, [list(render.pieces(s.messages, s.tools)) for s in samples])
        ]
        means[task] = sum(lengths) / n
    return means


def training_rows(tokenizer, seed, chances):
    """Blocks of training rows without end."""

    def conversations():
        rng = rng_for("train", seed)
        while True:
            yield from tokenized(tokenizer, [training_pieces(rng, chances) for _ in range(BATCH_SAMPLES)])

    block = []
    for row in pack(conversations(), tokenizer.token_to_id(render.PAD)):
        block.append(row)
        if len(block) == BLOCK_ROWS:
            yield stacked(block)
            block = []


def work(tokenizer_file, seed, chances, queue):
    for rows in training_rows(Tokenizer.from_file(tokenizer_file), seed, chances):
        queue.put(rows)


def start_workers(tokenizer_file, seed, n_workers):
    """Starts worker processes and returns the bounded queue of their blocks. They end with this process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(maxsize=4 * n_workers)
    chances = mix.probabilities(mean_tokens(Tokenizer.from_file(tokenizer_file)))
    for worker in range(n_workers):
        context.Process(target=work, args=(tokenizer_file, f"{seed}/{worker}", chances, queue), daemon=True).start()
    return queue


def test_samples(task, n, seed="test"):
    """`n` distinct held-out samples of a task."""
    rng, found = rng_for(seed, task), {}
    # Small tables have few held-out instances; distinct questions about the same one still count as distinct.
    for _ in range(50 * n):
        sample = mix.test_sample(rng, task)
        found.setdefault((sample.key, sample.messages[-2]["content"]), sample)
        if len(found) == n:
            break
    return list(found.values())


def test_rows(tokenizer, samples):
    """Rows of test conversations in which only the last answer is marked: that is what a test compares."""
    conversations = []
    for sample in samples:
        pieces = list(render.pieces(sample.messages, sample.tools))
        conversations.append([(text, flag and i == len(pieces) - 1) for i, (text, flag) in enumerate(pieces)])
    return stacked(pack(tokenized(tokenizer, conversations), tokenizer.token_to_id(render.PAD)))
