"""Training rows: from files to tokens, with every row accounted for.

``load_rows`` reads and checks alpaca, sharegpt, OpenAI messages, preference pairs and judged answers without
torch; ``fit_rows`` writes them by the tokenizer's chat template and cuts them; ``describe`` sums them up
in a line, and ``refused_file`` lists those that are not trained on.
"""

from ktbridge.sft.data.fit import Fitted, all_refused, data_file, describe, fit_rows
from ktbridge.sft.data.layout import Pair
from ktbridge.sft.data.messages import Conversation, Message, all_text
from ktbridge.sft.data.rows import Refused, Rows, digest, load_rows, refused_file, refused_note

__all__ = [
    "Conversation",
    "Fitted",
    "Message",
    "Pair",
    "Refused",
    "Rows",
    "all_refused",
    "all_text",
    "data_file",
    "describe",
    "digest",
    "fit_rows",
    "load_rows",
    "refused_file",
    "refused_note",
]
