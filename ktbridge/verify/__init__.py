"""Did an adapter take effect on a server?

``run.verify`` goes through it from end to end: ``logprob_client`` asks the server, ``reference_model``
computes what is right, ``verdict`` judges, and ``hypotheses`` looks for what is wrong among ``variants``.
References run the base ``layerwise``, from its files (``weight_reader``), with ``lora`` at the side.
Importing this package imports nothing heavy.
"""
