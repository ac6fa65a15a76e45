"""LLaMA-Factory's other files: predictions of a dataset, and a model to chat with or to serve.

``prompts`` makes a dataset's rows prompts; ``run`` has the embedded engine answer them, resumably; ``output``
has the files of a run. ``inference`` reads the inference YAML of `ktbridge chat` and `serve`.
"""
