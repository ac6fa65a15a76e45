"""Did an adapter take effect on a server?

``run.verify`` runs all steps: it queries the server, ``reference_model`` computes the expected values,
``verdict`` judges, and ``hypotheses`` finds the error among possible ones. References run the base
``layerwise``, from its files (``weight_reader``), with ``lora`` added by hooks.
Importing this package imports nothing heavy.
"""
