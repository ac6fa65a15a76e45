"""Training rows, from files to tokens, with every row accounted for.

records       files, dataset_info.json, Hub  -> raw rows with their places
conversation  raw rows of every form         -> TrainingRow (messages has their messages)
rows          all rows of a run, held-out rows, mixing
render        conversations                  -> RenderedText, by the chat template (template)
tokenize      texts                          -> TokenSequence, by stage
dataset       all sequences, mixed and packed -> TokenizedRows
stream        the same while a run goes on; open_rows and tokenize_run, the rows of a run
cache         tokenized rows for the next start
images        their headers, tokens and pixels
"""

from ktbridge.sft.data.cache import TokenCache, TokenizedRun
from ktbridge.sft.data.conversation import TrainingRow
from ktbridge.sft.data.dataset import (
    TokenizedRows,
    describe_rows,
    summarize_rows,
    tokenize_rows,
)
from ktbridge.sft.data.rows import (
    RefusedRow,
    Rows,
    collect_refused,
    fingerprint_rows,
    format_refused,
    load_rows,
    refused_note,
)
from ktbridge.sft.data.stream import RowStream, fingerprint_datasets, open_rows, tokenize_run
from ktbridge.sft.data.template import template_notes

__all__ = [
    "RefusedRow",
    "RowStream",
    "Rows",
    "TokenCache",
    "TokenizedRows",
    "TokenizedRun",
    "TrainingRow",
    "collect_refused",
    "describe_rows",
    "fingerprint_datasets",
    "fingerprint_rows",
    "format_refused",
    "load_rows",
    "open_rows",
    "refused_note",
    "summarize_rows",
    "template_notes",
    "tokenize_rows",
    "tokenize_run",
]
