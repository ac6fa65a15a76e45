"""What schemathesis loads: answers stay short, so that prompt and answer fit the context together.

That both fit is the one rule that a schema can't state, and an answer without a limit goes on to the
context's end. Numbers over the field's own maximum are left as they are: the server has to refuse them.
"""

import schemathesis

FIELDS = ("max_tokens", "max_completion_tokens")
SHORT, MAXIMUM = 24, 4095


@schemathesis.hook
def before_call(context, case, kwargs):
    body = case.body
    if isinstance(body, dict) and case.path.endswith("/completions"):
        if all(body.get(field) is None for field in FIELDS):
            body["max_tokens"] = SHORT
        for field in FIELDS:
            if type(body.get(field)) in (int, float) and SHORT < body[field] <= MAXIMUM:
                body[field] = SHORT
