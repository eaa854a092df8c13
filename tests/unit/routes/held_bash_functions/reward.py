def r(completions, answer, **kw):
    return [1.0 if a.split("#### ")[-1] in c[0]["content"] else 0.0 for c, a in zip(completions, answer)]
