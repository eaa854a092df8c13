def exact(completions, answer, **kw):
    return [float(c.strip().endswith(a)) for c, a in zip(completions, answer)]
