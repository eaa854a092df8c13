"""Figures of the merged report: what they show (`model`, `build`), drawn on the page (`svg`) and into files (`files`)."""
