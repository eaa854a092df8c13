REWARDS={"acc":lambda completions,**k:[1.0 for _ in completions]}
