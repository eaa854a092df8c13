"""Commands around an experiment: `init` writes its files, `list` names what there is, `gc` frees disk."""
