"""The built-in LLM agent: mini-swe-agent's loop, driven over plain HTTP and fit for a run with a budget.

Laid into the workspace and run there; nothing here is part of the suite itself. Needs mini-swe-agent 2.x with jinja2, pydantic,
rich, platformdirs and python-dotenv, which its three modules that are used here import; litellm, openai and the rest of
what it declares are never imported.
"""
