"""Launch SGLang-KT with the options that the installed version needs. Nothing here needs torch.

Read in this order: ``ktbridge.serve.request`` (what is asked for), ``facts`` (what engine, machine, model
and adapters are), ``launch`` (both together: an argv and its reasons; pure), ``preflight`` (every problem of
it), ``supervise`` (conversions, a process group, its log, what makes it ready, why it ended, and its end).
"""
