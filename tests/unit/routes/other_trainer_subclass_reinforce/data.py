ds=None
