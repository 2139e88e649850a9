"""What ``kvs bench needle``, ``perplexity`` and ``equivalence`` measure: the quality of what comes out, not its speed.

    setup        flags of a bench: engine settings, lists of numbers, where results go
    haystack     prompts that hide a fact        needle       asks for it, over depths and lengths
    perplexity   a text in windows
    equivalence  arenas against resident         distance     two sets of logits        llamacpp   the other engine
"""
