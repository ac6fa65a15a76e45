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

from ktbridge.sft.data.dataset import describe_rows, tokenize_rows
from ktbridge.sft.data.rows import RefusedRow, fingerprint_rows, format_refused, load_rows
from ktbridge.sft.data.stream import RowStream

__all__ = [
    "RefusedRow", "RowStream", "describe_rows", "fingerprint_rows", "format_refused", "load_rows",
    "tokenize_rows",
]  # fmt: skip
