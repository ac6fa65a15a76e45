"""What LLaMA-Factory's other files ask for: predictions of a dataset, and a model to chat with or to serve.

``prompts`` are a dataset's rows up to the answer that is asked for; ``run`` has the embedded engine answer
them, resumably (``journal``); ``results`` writes LLaMA-Factory's two files. ``inference`` reads its inference
YAML for `ktbridge chat` and `serve`.
"""
