"""Exact match of held-out answers without generating: if every answer token is the likeliest one after the right
tokens before it, greedy generation says exactly this answer, and the other way round.
"""

import torch

import data
from model import dense_mask

# Rows at once: a dense mask of [rows, 2048, 2048] and logits of [rows, 2048, 4096] must fit.
BATCH = 8


@torch.no_grad()
def teacher_forced(model, tokenizer, samples, device=None):
    """Share of samples whose last answer would be generated exactly."""
    device = device or next(model.parameters()).device
    rows = data.test_rows(tokenizer, samples)
    right = total = 0
    for start in range(0, len(rows.ids), BATCH):
        batch = slice(start, start + BATCH)
        ids, document = (
            torch.from_numpy(rows.ids[batch]).long().to(device),
            torch.from_numpy(rows.document[batch]).long().to(device),
        )
        answer = torch.from_numpy(rows.answer[batch]).bool().to(device)
        guessed = model(ids, dense_mask(document)).argmax(-1)
        wrong = answer[:, 1:] & (guessed[:, :-1] != ids[:, 1:])
        right_here, total_here = conversations_without(wrong, document[:, 1:])
        right, total = right + right_here, total + total_here
    return right / total


def conversations_without(wrong, document):
    """(conversations without a wrong token, all conversations); number 0 is padding."""
    mistakes = torch.zeros(len(wrong), 256, device=wrong.device).scatter_add_(1, document, wrong.float())
    n = int(document.amax(1).sum())
    return n - int((mistakes[:, 1:] > 0).sum()), n
