"""Runs programs that a model wrote, confined, against tests that they can't see. `runner.run_programs` is the way in.

A warm interpreter, the *nursery* (nursery.py), forks a *checker* (checker.py) for each program. That forks the *candidate*
(candidate.py), which confines itself (confine.py), defines the program and answers calls over a pipe. Only then does the
checker read the test. The test's `check` gets a stand-in, which sends the arguments to the candidate and returns what comes back,
rebuilt from plain data (frames.py). So a program shares no memory with its test: it can't see what is expected, patch what
compares, or tell anybody that it passed. All that it can do is answer.

What differs from one interpreter for both: a test doesn't see that its arguments were changed in place, and answers are compared
as what they are made of: an instance of a subclass of `int` is an int, of a class of the program's own is nothing.
"""
